"""
The command that converts between files of `torch.save` and checkpoints, with torch's arguments.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from enum import Enum

from shardkeep.compat.conversion import dcp_to_torch_save, torch_save_to_dcp


class FormatMode(Enum):
    """Which way to convert."""

    TORCH_TO_DCP = "torch_to_dcp"
    DCP_TO_TORCH = "dcp_to_torch"


def main(argv: Sequence[str] | None = None) -> None:
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(description="Convert between a file of torch.save and a checkpoint directory.")
    parser.add_argument("mode", type=str, choices=[mode.value for mode in FormatMode], help="which way to convert")
    parser.add_argument("src", type=str, help="what to convert: a file of torch.save, or a checkpoint's directory")
    parser.add_argument("dst", type=str, help="where the result goes")
    args = parser.parse_args(argv)
    to_checkpoint = args.mode == FormatMode.TORCH_TO_DCP.value
    print(f"Converting checkpoint from {args.src} to {args.dst} using method: '{args.mode}'")  # noqa: T201
    if "://" not in args.src and not (os.path.isfile if to_checkpoint else os.path.isdir)(args.src):
        print(f"No checkpoint found at {args.src}. Skipping conversion.")  # noqa: T201
        return
    (torch_save_to_dcp if to_checkpoint else dcp_to_torch_save)(args.src, args.dst)
