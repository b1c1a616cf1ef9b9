"""
Order of snapshots on an accelerator: work that a side stream queued before `save` is in the checkpoint, and after `load` a
side stream sees the loaded values. Needs an accelerator; exits with an error if either fails.
"""

from __future__ import annotations

import sys
import tempfile

import torch

import shardkeep as sk


def main() -> int:
    device = torch.accelerator.current_accelerator()
    wrong = 0
    for round_number in range(10):
        where = tempfile.mkdtemp() + "/ck"
        tensor = torch.zeros(1 << 22, device=device)
        torch.accelerator.synchronize()
        side = torch.Stream(device)
        with side:
            torch.cuda._sleep(200_000_000)  # about a tenth of a second of queued work
            tensor.fill_(round_number + 1)
            sk.save({"w": tensor}, where)
        saved = sk.open(where)["w"][...]
        wrong += int((saved != round_number + 1).sum())
        into = torch.zeros(1 << 22, device=device)
        with side:
            torch.cuda._sleep(200_000_000)
            into.fill_(-1)
            sk.load({"w": into}, where)
            seen = into + 0
        torch.accelerator.synchronize()
        wrong += int((seen != round_number + 1).sum())
    print(f"{wrong} wrong elements in 10 rounds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
