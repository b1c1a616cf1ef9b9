"""`shardkeep convert`: all of a checkpoint in another layout."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict

from shardkeep.cli.export import (
    TransferProgress,
    checked_text,
    parse_codecs,
    parse_size,
    quiet_log,
    warn_decrypted,
)
from shardkeep.cli.output import (
    echo,
    echo_err,
    format_count,
    format_size,
    print_json,
    printable,
    styled,
)
from shardkeep.cli.runs import path_hints

EXAMPLES = """
  shardkeep convert dcp-checkpoint runs/a/step-500 --to native
  shardkeep convert runs/a/step-500 out/for-torch --to dcp
  shardkeep convert runs/a/step-500 out/model --to safetensors --drop optimizer
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="native, torch DCP, or safetensors files")
    parser.add_argument("to_path", metavar="TO", help="a directory")
    parser.add_argument("--to", choices=("native", "dcp", "safetensors"), required=True, help="the layout of TO")
    parser.add_argument("--drop", metavar="GLOB", action="append", help="leave these names out (may be repeated)")
    parser.add_argument("--shard-size", metavar="SIZE", default="5GB", help="of safetensors files (default: 5GB)")
    parser.add_argument(
        "--codecs", metavar="NAMES", help="for native and dcp: what bytes go through, such as float,aes"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="pickled values, too: only if you trust them")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is at TO")


def run(args: argparse.Namespace) -> int:
    """Convert it, and say what was written."""
    from shardkeep.conversion.api import convert  # noqa: PLC0415 - it imports torch, which --help need not wait for

    size = parse_size(args.shard_size)
    with ExitStack() as stack, quiet_log(), path_hints(args.checkpoint):
        report = convert(
            args.checkpoint,
            args.to_path,
            args.to,
            drop=args.drop,
            max_shard_bytes=size,
            codecs=parse_codecs(args.codecs),
            overwrite=args.overwrite,
            allow_pickle=args.allow_pickle,
            progress=TransferProgress(stack, "convert"),
        )
    if args.json:
        print_json({**asdict(report), "gb_per_s": report.gb_per_s})
        return 0
    what = f"{format_count(report.tensors, 'tensor')}, {format_count(report.values, 'value')}"
    echo(
        f"{styled('wrote', 'green')} {printable(report.to)}: {what}, {format_size(report.bytes_written)} as {report.layout}"
    )
    echo(checked_text(report.seconds, report.gb_per_s))
    if report.decrypted:
        warn_decrypted(can_be=args.to != "safetensors")
    label = [each for each in report.left_out if each in {"step", "meta"}]
    if label:
        echo_err(f"torch's layout has no place for {' and '.join(label)} of the commit record", "yellow")
    if own := [each for each in report.left_out if each not in label]:
        echo_err(
            f"torch's layout has no {printable(', '.join(own))}: a plain dict by rank, which no PerRank loads", "yellow"
        )
    return 0
