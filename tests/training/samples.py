"""Models, optimizers and comparisons for the tests of training state."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks and a head; a frozen layer norm, and a buffer that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.norm = nn.LayerNorm(DIM).requires_grad_(requires_grad=False)
        self.head = nn.Linear(DIM, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.norm(self.second(self.first(x))))


class PerParameter(torch.optim.Optimizer):
    """An optimizer whose step is `update` of each parameter that has a gradient."""

    hyper: ClassVar[dict[str, Any]] = {"lr": 0.1}

    def __init__(self, params: Any, **hyper: Any) -> None:
        super().__init__(params, {**self.hyper, **hyper})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

    def update(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Rows(PerParameter):
    """Keeps a statistic of each row, as factored and preconditioned optimizers do, sharded as the rows are."""

    def update(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> None:
        rows = (p.grad * p.grad).reshape(p.shape[0], -1).mean(-1) if p.dim() > 1 else p.grad * p.grad
        state["rows"] = state["rows"] * 0.9 + rows if state else rows
        scale = 1 / (1 + state["rows"]).sqrt()
        p.sub_(p.grad * (scale.unsqueeze(-1) if p.dim() > 1 else scale) * group["lr"])


class Odd(PerParameter):
    """
    An optimizer with the state of many: nested dicts with numbers as keys, statistics of other shapes than the
    parameter's, whole numbers, strings, lists, and a plain number of steps.
    """

    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-2, "extra": ("kept", 1.5)}

    def update(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
            state["factors"] = {0: torch.zeros_like(p), "inner": {"sum": torch.zeros((), dtype=torch.float64)}}
            state["codes"] = torch.zeros_like(p, dtype=torch.uint8)
            state["count"] = 0
            state["mean"] = torch.zeros(3, dtype=p.dtype)
        state["count"] += 1
        state["mean"] += state["count"]
        state["momentum"].mul_(0.5).add_(p.grad)
        state["factors"][0].add_(p.grad * p.grad)
        state["factors"]["inner"]["sum"] += 1 / state["count"]
        state["codes"] = (state["codes"] + 1).to(torch.uint8)
        size = group["lr"] * float(state["factors"]["inner"]["sum"]) * float(state["mean"][0])
        p.add_(state["momentum"] / (1 + state["factors"][0]).sqrt(), alpha=-size)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd, "odd": Odd}


def batch(step: int) -> torch.Tensor:
    """Return the same numbers for the same step, whatever was drawn before."""
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    device = next(model.parameters()).device
    for step in steps:
        model(batch(step).to(device)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Sharded(NamedTuple):
    """A sharded tensor as plain values, to be compared."""

    kind: str
    shape: tuple[int, ...]
    layout: str
    parts: list[torch.Tensor]


def plain(value: Any) -> Any:
    """Turn sharded tensors into values that can be compared, and copy the others."""
    if isinstance(value, DTensor):
        return Sharded("dtensor", tuple(value.shape), str(value.placements), [value.to_local().detach().clone()])
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        where = str([(shard.metadata.shard_offsets, shard.metadata.shard_sizes) for shard in shards])
        return Sharded("sharded", tuple(value.size()), where, [shard.tensor.detach().clone() for shard in shards])
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(one) for one in value)
    return value


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """List where two trees of plain values differ, in keys, types, dtypes, shapes or any bit."""
    if type(ours) is not type(theirs) and not (isinstance(ours, Mapping) and isinstance(theirs, Mapping)):
        return [f"{where}: {type(ours).__name__} {ours!r}, expected {type(theirs).__name__} {theirs!r}"]
    if isinstance(ours, torch.Tensor):
        alike = ours.dtype == theirs.dtype and ours.device == theirs.device and ours.shape == theirs.shape
        return [] if alike and torch.equal(bits(ours), bits(theirs)) else [f"{where}: {ours}, expected {theirs}"]
    if isinstance(ours, Mapping):
        if ours.keys() != theirs.keys():
            return [f"{where}: keys {list(ours)}, expected {list(theirs)}"]
        return [line for key in ours for line in differences(ours[key], theirs[key], f"{where}.{key}")]
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} values, expected {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for number, (one, other) in pairs for line in differences(one, other, f"{where}.{number}")]
    return [] if ours == theirs else [f"{where}: {ours!r}, expected {theirs!r}"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
