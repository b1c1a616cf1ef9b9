"""One small model in every wrapper that training uses, with what a test does to it on each rank."""

import warnings
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.training.samples import PerParameter

WIDTH = 8
DEPTH = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks by number, so that a pipeline stage may hold only some of them; a buffer, and a frozen parameter."""

    def __init__(self, blocks=range(DEPTH)):
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): Block() for i in blocks})
        if 0 in blocks:
            self.scale = nn.Parameter(torch.full((3, WIDTH), 0.5), requires_grad=False)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


class Factored(PerParameter):
    """Keeps a momentum like its parameter, row factors of the whole parameter, a list, a number and a word."""

    hyper: ClassVar = {"lr": 0.05, "decay": (0.9, 0.1), "kind": "factored"}

    def update(self, p, kept, group):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        rows = grad.reshape(grad.shape[0], -1).square().mean(1)
        if not kept:
            kept.update(momentum=torch.zeros_like(p), rows=torch.zeros_like(rows), history=[0], count=0, word="warm")
        kept["rows"].mul_(0.5).add_(rows)
        kept["history"] = [*kept["history"], kept["count"]]
        kept["count"] += 1
        kept["momentum"].mul_(group["decay"][0]).add_(p.grad, alpha=group["decay"][1])
        p.add_(kept["momentum"], alpha=-group["lr"])


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False),
    "factored": Factored,
}


def tensor_parallel(model, mesh):
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fsdp2(model, mesh):
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    return model


def fsdp1(model, *, use_orig_params):
    frozen = model.scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, block in model.blocks.items():
            model.blocks[name] = FullyShardedDataParallel(
                block, use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
        return FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu"), ignored_states=[frozen]
        )


def stage(rank, ranks):
    return range(rank * DEPTH // ranks, (rank + 1) * DEPTH // ranks)


WORLDS = {
    "none": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp1 original": 2,
    "fsdp2": 3,
    "hsdp": 4,
    "tp": 2,
    "fsdp2 tp": 4,
    "pipeline": 2,
    "compile": 1,
    "checkpointing": 2,
}


def mesh_for(kind):
    """The mesh that a wrapper needs: made once for all models of a run, as its process groups take long to make."""
    ranks = dist.get_world_size()
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if kind == "fsdp2 tp":
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (ranks,)) if kind in {"fsdp2", "tp", "checkpointing"} else None


def build(kind, mesh):
    torch.manual_seed(dist.get_world_size())  # another start for each, so that what is equal was loaded
    ranks = dist.get_world_size()
    model = Net(stage(dist.get_rank(), ranks)) if kind == "pipeline" else Net()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        return fsdp1(model, use_orig_params=kind != "fsdp1")
    if kind in {"fsdp2", "hsdp"}:
        return fsdp2(model, mesh)
    if kind == "tp":
        return tensor_parallel(model, mesh)
    if kind == "fsdp2 tp":
        return fsdp2(tensor_parallel(model, mesh["tp"]), mesh["dp"])
    if kind == "compile":
        return torch.compile(model, backend="eager")
    if kind == "checkpointing":
        for name, block in model.blocks.items():
            model.blocks[name] = checkpoint_wrapper(block)
        return fsdp2(model, mesh)
    return model


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(kind, model, optimizer, steps, seed):
    """The same whole batch on every rank, so that every way of spreading the model does the same sums."""
    data = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        losses.append(gradients(kind, model, optimizer, data))
        optimizer.step()
    return losses


def gradients(kind, model, optimizer, data):
    x = torch.randn(6, WIDTH, generator=data)
    optimizer.zero_grad()
    return pipeline_step(model, x) if kind == "pipeline" else one_step(model, x)


def losses_from_here(kind, model, optimizer, seed):
    """A step, and the loss after it: the first is that of the parameters, the second that of the optimizer's state."""
    data = torch.Generator().manual_seed(seed)
    first = gradients(kind, model, optimizer, data)
    optimizer.step()
    if kind == "pipeline":
        return [first, gradients(kind, model, optimizer, data)]
    return [first, model(torch.randn(6, WIDTH, generator=data)).square().mean().item()]


def one_step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()


def pipeline_step(model, x):
    """Forward and backward through the stages, one rank after the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.recv(x, rank - 1)
        x.requires_grad_()
    out = model(x)
    if rank < ranks - 1:
        dist.send(out.detach(), rank + 1)
        grad = torch.empty_like(out)
        dist.recv(grad, rank + 1)
        out.backward(grad)
    loss = out.square().mean()
    if rank == ranks - 1:
        loss.backward()
    if rank:
        dist.send(x.grad, rank - 1)
    shared = torch.tensor([loss.item()], dtype=torch.float64)
    dist.broadcast(shared, ranks - 1)
    return shared.item()
