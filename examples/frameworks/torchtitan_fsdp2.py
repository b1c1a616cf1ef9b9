"""
Torchtitan's `CheckpointManager` with FSDP2: train, save on the way, export; or load and go on from there.

    torchrun --nproc-per-node 2 examples/frameworks/torchtitan_fsdp2.py /tmp/run
    torchrun --nproc-per-node 2 -m shardkeep.dcp examples/frameworks/torchtitan_fsdp2.py /tmp/run --resume

The first run uses torch's distributed checkpoint, the second shardkeep's, without a change of the program. `--mode async` saves
in the background. The last step is exported as Hugging Face safetensors, in two files, and read back.
"""
# ruff: noqa: INP001 - a script to read and run

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tiny_job import SAVED, STEPS, Timed, arguments, batch_of, fingerprint, loss_of, say, tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.protocols.state_dict_adapter import StateDictAdapter


class TrainState:
    """What a trainer of torchtitan saves beside model, optimizer and schedule."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Names(StateDictAdapter):
    """Other names on the hub, and two files there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model_config=None, hf_assets_path=None)
        self.fqn_to_index_mapping = {f"hub.{name}": 1 if name < "1" else 2 for name, _ in model.named_parameters()}

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"hub.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hub."): value for name, value in hf_state_dict.items()}


class Job:
    """A trainer with torchtitan's parts."""

    def __init__(self, args: Namespace, **checkpoint: Any) -> None:
        self.model: nn.Module = fully_shard(tiny_model(args))
        # Not fused: that rounds by where a shard ends, and gives other bits on other numbers of ranks.
        self.optimizers: OptimizersContainer = replace(default_adamw(lr=1e-2), implementation="for-loop").build(
            model_parts=[self.model]
        )
        self.schedule: LRSchedulersContainer = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.state = TrainState()
        self.checkpoints: CheckpointManager = CheckpointManager.Config(
            enable=True, interval=SAVED, last_save_in_hf=True, keep_latest_k=0, **checkpoint
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self.state},
            sd_adapter=Names(self.model),
        )

    def train_step(self) -> float:
        self.state.step += 1
        self.checkpoints.maybe_wait_for_staging()
        self.optimizers.zero_grad()
        loss = loss_of(self.model, batch_of(self.state.step))
        loss.backward()
        self.optimizers.step()
        self.schedule.step()
        return loss.item()

    def fingerprint(self) -> str:
        return fingerprint(self.model, self.optimizers.optimizers[0])

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor() for parameter in self.model.parameters()]


def main() -> None:
    args = arguments(__doc__, mode=["disabled", "async", "async_with_pinned_mem"])
    dist.init_process_group("gloo")
    job = Job(args, folder=args.folder, async_mode=args.mode, initial_load_model_only=False)
    save = Timed(job.checkpoints.save, finish=job.checkpoints.maybe_wait_for_saving)
    at_save = ""
    if args.resume:
        job.checkpoints.load(step=SAVED)
        at_save = job.fingerprint()
    losses = {}
    while job.state.step < STEPS:
        loss = job.train_step()
        losses[job.state.step] = loss
        if job.state.step == SAVED:
            save(job.state.step)
            at_save = job.fingerprint()
    final = job.fingerprint()
    for number in range(args.saves):
        save(STEPS + (number + 1) * SAVED)
    job.checkpoints.save(STEPS, last_step=True)
    job.checkpoints.maybe_wait_for_saving()
    job.checkpoints.close()

    exported = f"{args.folder}/step-{STEPS}"
    args.resume = True
    other = Job(args, folder=f"{args.folder}/empty", initial_load_path=exported, initial_load_in_hf=True)
    other.checkpoints.load()
    same = all(torch.equal(one, two) for one, two in zip(job.weights(), other.weights(), strict=True))
    say("torchtitan", f"{args.folder}/step-{SAVED}", losses, at_save, final, save, exported=same)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
