"""
Lightning with FSDP2 (`ModelParallelStrategy`): fit, save a sharded checkpoint on the way; or fit on from there.

    torchrun --nproc-per-node 2 examples/frameworks/lightning_fsdp2.py /tmp/checkpoint
    torchrun --nproc-per-node 2 -m shardkeep.dcp examples/frameworks/lightning_fsdp2.py /tmp/checkpoint --resume

The first run uses torch's distributed checkpoint, the second shardkeep's, without a change of the program.
"""
# ruff: noqa: INP001 - a script to read and run

import os
from argparse import Namespace
from collections.abc import Iterator

import lightning as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from tiny_job import SAVED, STEPS, Timed, arguments, batch_of, fingerprint, loss_of, say, tiny_model
from torch.distributed.fsdp import fully_shard


class Batches:
    """A loader whose position Lightning saves and restores."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.given < STEPS:
            self.given += 1
            yield batch_of(self.given)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Job(pl.LightningModule):
    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.args = args
        self.losses: dict[int, float] = {}
        self.at_save = ""

    def configure_model(self) -> None:
        self.net = tiny_model(self.args)
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        if self.args.resume and not self.losses:
            self.at_save = self.fingerprint()
        loss = loss_of(self.net, batch)
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def fingerprint(self) -> str:
        return fingerprint(self.net, self.optimizers().optimizer)


class Save(pl.Callback):
    def setup(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        self.save = Timed(trainer.save_checkpoint)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Job, *_: object) -> None:
        if trainer.global_step == SAVED and not module.args.resume:
            self.save(module.args.folder)
            module.at_save = module.fingerprint()


def main() -> None:
    args = arguments(__doc__)
    job = Job(args)
    callback = Save()
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        max_steps=STEPS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(job, Batches(), ckpt_path=args.folder if args.resume else None)
    for number in range(args.saves):
        callback.save(f"{args.folder}-{number}")
    say("lightning", args.folder, job.losses, job.at_save, job.fingerprint(), callback.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
