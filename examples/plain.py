"""
Save and restore a model and its optimizer in one process, with no process group.

    python examples/plain.py
"""
# ruff: noqa: INP001, T201 - a script to read and run

import tempfile

import torch
from torch import nn

import shardkeep as sk


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


model, optimizer = build()
train(model, optimizer)
where = tempfile.mkdtemp() + "/step-3"
state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3, "rng": torch.get_rng_state()}
saved = sk.save(state, where, step=3, meta={"run": "plain example"})
print(f"saved {saved.bytes_total} bytes in {saved.seconds:.3f} s to {where}")

# Later, in another process: build the same things, let a load fill them in place.
other_model, other_optimizer = build()
train(other_model, other_optimizer)  # other weights; and moments, for the load to fill
state = {
    "model": other_model.state_dict(),
    "optim": other_optimizer.state_dict(),
    "step": 0,
    "rng": torch.get_rng_state(),
}
loaded = sk.load(state, where)
other_optimizer.load_state_dict(state["optim"])
torch.set_rng_state(state["rng"])
print(f"loaded step {state['step']}: {loaded.bytes_read} bytes in {loaded.seconds:.3f} s")

same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
print("weights are equal, bit for bit" if same else "weights DIFFER")
