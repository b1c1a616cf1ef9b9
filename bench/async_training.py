"""A training run to save from: a small transformer in bf16 with AdamW and fp32 moments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import nn

LAYERS = 28
HEAD = 64
BYTES_EACH = 10
"""Of a parameter: two of the weight, four of each moment."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MixedAdamW(torch.optim.AdamW):
    """AdamW over bf16 weights that keeps its moments in fp32; torch's own makes them bf16, as the weights are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    moments = {n: torch.zeros_like(p, dtype=torch.float32) for n in ("exp_avg", "exp_avg_sq")}
                    self.state[p] = {"step": torch.tensor(0.0), **moments}
            steps, first, second = ([self.state[p][n] for p in params] for n in ("step", "exp_avg", "exp_avg_sq"))
            beta1, beta2 = group["betas"]
            torch._foreach_add_(steps, 1)
            number = steps[0].item()  # on the CPU: waits for nothing
            grads = [p.grad.float() for p in params]
            torch._foreach_lerp_(first, grads, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
            below = torch._foreach_sqrt(second)
            torch._foreach_div_(below, (1 - beta2**number) ** 0.5)
            torch._foreach_add_(below, group["eps"])
            change = torch._foreach_div(first, below)
            torch._foreach_mul_(change, -group["lr"] / (1 - beta1**number))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, [c.to(p.dtype) for c, p in zip(change, params, strict=True)])


class Stack(nn.Module):
    """As many large weights as there are layers, and nothing else: with their moments, 84 tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0].weight
        x = F.one_hot(tokens % len(weight), len(weight)).to(weight.dtype)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Training:
    """The model, its optimizer and one batch; `state` is what is saved, the same objects for everyone."""

    def __init__(self, gb: float, device: torch.device, tokens: int, *, few: bool = False) -> None:
        torch.manual_seed(0)
        wanted = gb * 1e9 / BYTES_EACH
        width = max(HEAD, round((wanted / (1 if few else 12) / LAYERS) ** 0.5 / HEAD) * HEAD)
        words = width if few else 4 * width
        layers = max(1, round((wanted - 2 * words * width) / (12 * width**2)))
        self.device = device
        with device:  # made there at once: the CPU takes long to draw a gigabyte of random numbers
            self.model = (Stack(width) if few else Transformer(width, layers, words)).to(torch.bfloat16)
        self.optimizer = MixedAdamW(self.model.parameters(), lr=1e-4)
        length = min(1024, tokens)
        self.batch = torch.randint(words, (max(1, tokens // length), length + 1), device=device)
        self._ends: list[torch.Event] = []
        self.step()  # makes the moments
        self.drain()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "step": 7}

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Every tensor of the state: its name in our checkpoints, its name in torch's, and itself."""
        for index, (name, p) in enumerate(self.model.named_parameters()):
            yield f"model.{name}", f"model.{name}", p.detach()
            for part, tensor in self.optimizer.state[p].items():
                yield f"optim.state.{name}.{part}", f"optim.state.{index}.{part}", tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, _, tensor in self.tensors())

    def backward(self) -> None:
        """Forward and backward; gradients are left behind."""
        logits = self.model(self.batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten()).backward()

    def step(self) -> None:
        """One whole step. The host runs ahead of the device by one step at most, as a loop that logs its loss does."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type != "cpu":
            end = torch.Event(self.device)
            end.record()
            self._ends.append(end)
            if len(self._ends) > 1:
                self._ends.pop(0).synchronize()

    def drain(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._ends.clear()

    def seconds_a_step(self, steps: int) -> float:
        self.drain()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.drain()
        return (time.perf_counter() - began) / steps
