"""`shardkeep cat`: the commit record of a checkpoint, checked before it is printed."""

from __future__ import annotations

import argparse

import msgspec

from shardkeep.cli.output import echo, is_terminal, print_json, printable_lines
from shardkeep.cli.runs import path_hints
from shardkeep.engine.sources import find
from shardkeep.format.record import FORMAT, MAX_RECORD_NBYTES, RECORD_NAME
from shardkeep.options import Options
from shardkeep.storage.resolve import open_store

EXAMPLES = """
  shardkeep cat runs/a/step-500
  shardkeep cat runs/a/step-500 --json | jq .meta
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT")


def run(args: argparse.Namespace) -> int:
    """Print it: as it is stored, or what stands for it in a checkpoint of another format."""
    store = open_store(args.checkpoint, direct=Options().direct_io)
    with path_hints(args.checkpoint):
        record = find(store).record
    if record.format == FORMAT:
        text = store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES)
    else:
        text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    if args.json:
        print_json(msgspec.json.decode(text))
    else:
        shown_text = text.decode().rstrip()
        echo(printable_lines(shown_text) if is_terminal() else shown_text)
    return 0
