"""The keys of one checkpoint: as a table, with their chunks, or as a tree."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shardkeep.cli.contents import (
    Item,
    chunks_of,
    document_of,
    item_document,
    items_of,
    summary_of,
    value_of,
    wanted_keys,
)
from shardkeep.cli.drawing import print_chunks
from shardkeep.cli.output import (
    Table,
    count_text,
    print_json,
    say,
    shape_text,
    shown,
    size_text,
    styled,
)
from shardkeep.cli.problems import NotUsable, did_you_mean
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.opening import Checkpoint

_MOST_VALUE = 40


def list_keys(checkpoint: Checkpoint, args: argparse.Namespace) -> int:
    """List what is in a checkpoint."""
    items = list(items_of(checkpoint, wanted_keys(args.pattern, args.prefix)))
    if not items and (args.pattern or args.prefix):
        asked = args.prefix or args.pattern[0]
        hint = did_you_mean(asked, checkpoint, otherwise="a pattern is a key, a dotted prefix of keys, or a glob")
        raise NotUsable(f"no key fits {' '.join([*args.pattern, args.prefix or '']).strip()!r}", hint=hint)
    if args.json:
        found = [item_document(checkpoint, item, chunks=args.long) for item in items]
        print_json({"kind": "checkpoint", "path": args.path, **document_of(checkpoint), "items": found})
        return 0
    if args.names:
        for item in items:
            say(shown(item.key))
        return 0
    say(f"{styled(args.path, 'bold')}  {summary_of(checkpoint)}\n")
    if args.tree:
        _print_tree(_grown(items), args.depth)
    elif args.long:
        _print_long(checkpoint, items)
    else:
        _print_table(checkpoint, items)
    return 0


def _print_table(checkpoint: Checkpoint, items: Iterable[Item]) -> None:
    table = Table(("key", "dtype", "shape", "size", "chunks"), right="size chunks", gives_way="key")
    for item in items:
        if item.is_tensor:
            size = "tied" if item.tied_to else size_text(item.nbytes)
            table.add(shown(item.key), item.dtype, shape_text(item.shape), size, f"{item.chunks:,}")
        else:
            table.add(shown(item.key), "value", tail=_value_text(checkpoint, item))
    table.print()


def _value_text(checkpoint: Checkpoint, item: Item) -> str:
    """Return a value in few letters; what lies in files of its own is not read for a list."""
    if checkpoint.record.format != NATIVE:
        return ""
    value, why_not = value_of(checkpoint, item.key)
    text = f"({why_not})" if why_not else shown(repr(value))
    return text if len(text) <= _MOST_VALUE else text[: _MOST_VALUE - 1] + "…"


def _print_long(checkpoint: Checkpoint, items: Iterable[Item]) -> None:
    for item in items:
        if not item.is_tensor:
            value, why_not = value_of(checkpoint, item.key)
            say(f"{styled(shown(item.key), 'cyan')}  {why_not or shown(repr(value))}")
            continue
        tied = f", shared with {shown(item.tied_to)}" if item.tied_to else ""
        say(f"{styled(shown(item.key), 'cyan')}  {item.what}, {size_text(item.nbytes)}{tied}")
        print_chunks(chunks_of(checkpoint, item) if not tied else ())


@dataclass
class _Branch:
    keys: int = 0
    nbytes: int = 0
    leaf: Item | None = None
    below: dict[str, _Branch] = field(default_factory=dict)


def _grown(items: Iterable[Item]) -> _Branch:
    root = _Branch()
    for item in items:
        branch = root
        for part in item.key.split("."):
            branch.keys += 1
            branch.nbytes += item.own_nbytes
            branch = branch.below.setdefault(part, _Branch())
        branch.keys += 1
        branch.nbytes += item.own_nbytes
        branch.leaf = item
    return root


def _print_tree(root: _Branch, depth: int | None) -> None:
    stack: list[tuple[str, str, _Branch, int, bool]] = []

    def push(branch: _Branch, indent: str, level: int) -> None:
        children = sorted(branch.below.items(), key=_in_order)
        for at, (name, child) in reversed(list(enumerate(children))):
            stack.append((indent, name, child, level, at == len(children) - 1))

    push(root, "", 1)
    while stack:  # not by recursion: a key may have thousands of dots
        indent, name, branch, level, last = stack.pop()
        while branch.leaf is None and len(branch.below) == 1:  # nothing to choose from: on one line
            [(more, branch)] = branch.below.items()
            name = f"{name}.{more}"
        line = f"{indent}{'└─ ' if last else '├─ '}{shown(name)}"
        if branch.leaf is not None:
            say(f"{line}  {styled(branch.leaf.what, 'dim')}")
        else:
            holds = f"{count_text(branch.keys, 'key')}, {size_text(branch.nbytes)}"
            say(f"{line}  {styled(holds, 'dim')}")
        if depth is None or level < depth:
            push(branch, indent + ("   " if last else "│  "), level + 1)


def _in_order(child: tuple[str, Any]) -> tuple[int, int, str]:
    """Sort numbers as numbers: layer 10 comes after layer 9."""
    name = child[0]
    return (0, int(name), name) if name.isascii() and name.isdigit() and len(name) < 19 else (1, 0, name)
