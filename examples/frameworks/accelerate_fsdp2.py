"""
Hugging Face Accelerate with FSDP2: train, `save_state`, go on; or `load_state` and go on from there.

    torchrun --nproc-per-node 2 examples/frameworks/accelerate_fsdp2.py /tmp/state
    torchrun --nproc-per-node 2 -m shardkeep.dcp examples/frameworks/accelerate_fsdp2.py /tmp/state --resume

The first run uses torch's distributed checkpoint, the second shardkeep's, without a change of the program.
"""
# ruff: noqa: INP001 - a script to read and run

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from tiny_job import SAVED, STEPS, Timed, arguments, batch_of, fingerprint, loss_of, say, tiny_model


def main() -> None:
    args = arguments(__doc__)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    # Accelerate turns FSDP on for accelerators only, and not for CPU ranks (MULTI_CPU): so these say they are others.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(fsdp_plugin=plugin)

    model = tiny_model(args)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    save = Timed(accelerator.save_state)
    done, losses, at_save = 0, {}, ""
    if args.resume:
        accelerator.load_state(args.folder)
        done, at_save = SAVED, fingerprint(model, optimizer.optimizer)
    for step in range(done + 1, STEPS + 1):
        loss = loss_of(model, batch_of(step))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if step == SAVED:
            save(args.folder)
            at_save = fingerprint(model, optimizer.optimizer)

    final = fingerprint(model, optimizer.optimizer)
    for number in range(args.saves):
        save(f"{args.folder}-{number}")
    say("accelerate", args.folder, losses, at_save, final, save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
