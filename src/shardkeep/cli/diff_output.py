"""What `shardkeep diff` found, for people and for programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkeep.cli.contents import Item
from shardkeep.cli.output import Table, count_text, number_text, plain_json, say, shape_text, shown, styled

if TYPE_CHECKING:
    from shardkeep.cli.diff import Difference
    from shardkeep.cli.diff_values import Change

_FEW = 10
"""With so few changed elements, the first of them is worth a line."""
_MOST_VALUE = 30


def print_difference(found: Difference, args: argparse.Namespace) -> None:
    """Print what differs, or that nothing does."""
    say(f"A  {args.a}\nB  {args.b}\n")
    for title, items in (("only in A", found.only_a), ("only in B", found.only_b)):
        _print_items(title, items, args.limit)
    _print_kinds(found, args.limit)
    _print_values(found, args.limit)
    _print_tensors(found, args.limit)
    unread = f", {found.by_digests:,} of them by their digests: not read" if found.by_digests else ""
    same = "the same keys, shapes and dtypes" if args.keys_only else f"equal{unread}"
    if not found.count:
        say(styled(f"no difference: {count_text(found.equal, 'key')} {same}", "green"))
    else:
        say(f"{styled(f'{found.count:,} differ', 'red')}; {count_text(found.equal, 'key')} {same}")


def _print_items(title: str, items: Sequence[Item], limit: int) -> None:
    if items:
        say(styled(f"{title}: {count_text(len(items), 'key')}", "bold"))
        table = Table(("key", "what"), gives_way="key", indent="  ", headless=True)
        for item in _some(items, limit):
            table.add(shown(item.key), item.what)
        table.print()
        _print_rest(items, limit)


def _print_kinds(found: Difference, limit: int) -> None:
    if found.kinds:
        say(styled(f"another shape or dtype: {count_text(len(found.kinds), 'key')}", "bold"))
        table = Table(("key", "A", "B"), gives_way="key", indent="  ")
        for one, other in _some(found.kinds, limit):
            table.add(shown(one.key), one.what, other.what)
        table.print()
        _print_rest(found.kinds, limit)


def _print_values(found: Difference, limit: int) -> None:
    if found.values:
        say(styled(f"other values: {count_text(len(found.values), 'key')}", "bold"))
        table = Table(("key", "A", "B"), gives_way="key", indent="  ")
        for item, change in _some(found.values, limit):
            table.add(shown(item.key), _brief(change.before), _brief(change.after))
        table.print()
        _print_rest(found.values, limit)


def _print_tensors(found: Difference, limit: int) -> None:
    if not found.tensors:
        return
    say(styled(f"other elements: {count_text(len(found.tensors), 'tensor')}", "bold"))
    table = Table(
        ("key", "changed", "share", "max", "relative"), right="changed share max relative", gives_way="key", indent="  "
    )
    for item, change in _some(found.tensors, limit):
        share = f"{change.changed / change.elements:.1%}" if change.changed * 1000 > change.elements else "<0.1%"
        numbers = (
            number_text(float(f"{x:.4g}")) if change.has_numbers else "" for x in (change.max_abs, change.relative)
        )
        table.add(shown(item.key), f"{change.changed:,}", share, *numbers, below=_remark(change))
    table.print()
    _print_rest(found.tensors, limit)
    say(styled("  max: the greatest |a-b|; relative: the norm of the change by the norm of A", "dim"))


def _remark(change: Change) -> str:
    remarks = []
    if change.changed <= _FEW and change.first is not None:
        remarks.append(f"at {shape_text(change.first)}: {_both(change.before, change.after)}")
    if change.bits_alone:
        remarks.append(f"{change.bits_alone:,} in bits alone (-0.0, or kinds of NaN)")
    if change.not_finite:
        remarks.append(f"{change.not_finite:,} with NaN or Inf on one side")
    return "; ".join(remarks)


def _both(before: Any, after: Any) -> str:
    """Return both with as many digits as it takes to tell them apart, nine at least."""
    if all(isinstance(value, (float, complex)) for value in (before, after)):
        texts = f"{before:.9g}", f"{after:.9g}"
        if texts[0] != texts[1]:
            return " → ".join(texts)
    return f"{before!r} → {after!r}"


def _brief(value: Any) -> str:
    text = shown(repr(value))
    return text if len(text) <= _MOST_VALUE else text[: _MOST_VALUE - 1] + "…"


def _some(items: Sequence[Any], limit: int) -> Sequence[Any]:
    return items[:limit] if limit > 0 else items


def _print_rest(items: Sequence[Any], limit: int) -> None:
    if 0 < limit < len(items):
        say(f"  and {len(items) - limit:,} more (--limit 0 lists them)")
    say()


def document_of(found: Difference, args: argparse.Namespace) -> dict[str, Any]:
    """Return all that differs, for programs."""
    return {
        "a": args.a,
        "b": args.b,
        "equal": found.count == 0,
        "different_keys": found.count,
        "equal_keys": found.equal,
        "equal_by_digests": found.by_digests,
        "only_in_a": [_item(item) for item in found.only_a],
        "only_in_b": [_item(item) for item in found.only_b],
        "other_kind": [{"key": one.key, "a": _kind(one), "b": _kind(other)} for one, other in found.kinds],
        "other_values": [
            {"key": item.key, "a": plain_json(change.before), "b": plain_json(change.after)}
            for item, change in found.values
        ],
        "other_elements": [{"key": item.key, **_kind(item), **_change(change)} for item, change in found.tensors],
    }


def _item(item: Item) -> dict[str, Any]:
    return {"key": item.key, **_kind(item)}


def _kind(item: Item) -> dict[str, Any]:
    return {"dtype": item.dtype, "shape": list(item.shape)} if item.is_tensor else {"dtype": None, "shape": None}


def _change(change: Change) -> dict[str, Any]:
    return {
        "elements": change.elements,
        "changed": change.changed,
        "bits_alone": change.bits_alone,
        "not_finite": change.not_finite,
        "max_abs": change.max_abs if change.has_numbers else None,
        "norm": change.norm if change.has_numbers else None,
        "relative_norm": change.relative if change.has_numbers else None,
        "first": {"index": list(change.first or ()), "a": plain_json(change.before), "b": plain_json(change.after)},
    }
