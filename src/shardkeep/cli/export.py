"""`shardkeep export` and `convert` write a checkpoint in another form; `rotate` wraps its data keys with another key."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.jobs import JOBS, jobs_for, sharing
from shardkeep.cli.runs import Run, open_checkpoint_or_run, path_hints
from shardkeep.conversion.rotate import rotate_keys
from shardkeep.display import some_of
from shardkeep.errors import CheckpointError, StateError
from shardkeep.options import parse_size

if TYPE_CHECKING:
    from shardkeep.conversion.api import ConvertReport, ExportReport

_MAX_NAMED = 4
T = TypeVar("T")


@command(
    argument("checkpoint", metavar="CHECKPOINT", help="native, torch DCP, safetensors, or a .pt file"),
    argument("to", metavar="TO", help="a directory (hf), or a file (torch)"),
    argument("--format", choices=("hf", "torch", "native"), default="hf", help="what to write (default: hf)"),
    argument("--dtype", metavar="TYPE", help="bf16, fp16, fp32: convert floating point weights"),
    argument("--shard-size", metavar="SIZE", default="5GB", help="greatest size of a file (default: 5GB)"),
    argument("--include", metavar="GLOB", action="append", help="only these names (may be repeated)"),
    argument("--exclude", metavar="GLOB", action="append", help="not these names (may be repeated)"),
    argument(
        "--rename", metavar="s/RE/TEXT/", action="append", help="change names by a regular expression (may be repeated)"
    ),
    argument("--prefix", metavar="TEXT", help="only names with this prefix, without it (default: model.)"),
    argument("--config", metavar="DIR", help="copy config.json, tokenizer and all but weights from there"),
    argument("--codecs", metavar="NAMES", help="for native: codecs for the files, such as float,aes"),
    argument("--overwrite", action="store_true", help="replace what is at TO"),
    JOBS,
    examples="""
  shardkeep export runs/a/step-500 out/model --dtype bf16 --config base-model
  shardkeep export runs/a/step-500 out --rename 's/^net\\.//' --exclude '*.ema'
  shardkeep export runs/a/step-500 out/model.pt --format torch
  shardkeep export runs/a/step-500 out/model --shard-size 1GB --jobs 4
""",
)
def export(args: argparse.Namespace) -> int:
    from shardkeep.conversion.api import export  # noqa: PLC0415 - imports torch, which --help does not need

    how = {name: getattr(args, name) for name in ("format", "dtype", "include", "exclude", "prefix", "config")}
    how["rename"] = [parse_rename(text) for text in args.rename or ()] or None
    if args.format == "torch":  # a single file has a single writer
        args.jobs = 1
    report = _transfer(export, args, args.to, **how)
    if args.json:
        return out.print_json({**asdict(report), "gb_per_s": report.gb_per_s})
    what = f"{out.format_count(report.tensors, 'tensor')}, {out.format_size(report.bytes_written)}"
    _print_written(report, f"{what} in {out.format_count(len(report.files), 'file')}", native=args.format == "native")
    once = " and stored once" if args.format == "hf" else ""
    for name, owner in list(report.ties.items())[:_MAX_NAMED]:
        print(f"  {out.printable(name)} is tied to {out.printable(owner)}{once}")
    if report.skipped:
        names = [f"{name} ({out.format_count(many, 'tensor')})" for name, many in report.skipped.items()]
        print(f"  left out: {out.printable(some_of(names))}")
    left_out, infinite = (out.printable(some_of(each)) for each in (report.left_out, report.infinite))
    if left_out:
        out.echo_err(f"left out, because safetensors files hold only tensors: {left_out}", "yellow")
    if infinite:
        out.echo_err(f"numbers too large for {args.dtype} became infinite in {infinite}", "yellow")
    return 0


@command(
    argument("checkpoint", metavar="CHECKPOINT", help="native, torch DCP, safetensors, or a .pt file"),
    argument("to_path", metavar="TO", help="a directory"),
    argument(
        "--to", choices=("native", "dcp", "safetensors"), default="native", help="the layout of TO (default: native)"
    ),
    argument("--drop", metavar="GLOB", action="append", help="leave these names out (may be repeated)"),
    argument("--shard-size", metavar="SIZE", default="5GB", help="of safetensors files (default: 5GB)"),
    argument("--codecs", metavar="NAMES", help="for native: codecs for the files, such as float,aes"),
    argument("--allow-pickle", action="store_true", help="also pickled values: only if you trust them"),
    argument("--overwrite", action="store_true", help="replace a checkpoint that is at TO"),
    JOBS,
    examples="""
  shardkeep convert dcp-checkpoint runs/a/step-500
  shardkeep convert runs/a/step-500 out/for-torch --to dcp
  shardkeep convert runs/a/step-500 out/model --to safetensors --drop optimizer
""",
)
def convert(args: argparse.Namespace) -> int:
    from shardkeep.conversion.api import convert  # noqa: PLC0415 - imports torch, which --help does not need

    report = _transfer(convert, args, args.to_path, layout=args.to, drop=args.drop, allow_pickle=args.allow_pickle)
    if args.json:
        return out.print_json({**asdict(report), "gb_per_s": report.gb_per_s})
    what = f"{out.format_count(report.tensors, 'tensor')}, {out.format_count(report.values, 'value')}"
    size_text = out.format_size(report.bytes_written)
    _print_written(report, f"{what}, {size_text} as {report.layout}", native=args.to == "native")
    if report.left_out:
        out.echo_err(f"torch's layout has no place for {out.printable(', '.join(report.left_out))}", "yellow")
    return 0


def _transfer(function: Callable[..., T], args: argparse.Namespace, to: str, **how: Any) -> T:
    """Do the work; show progress and path hints, and silence the library's log, because the command prints the same."""
    source, size = args.checkpoint, parse_size(args.shard_size, "--shard-size")
    codecs = [name for name in map(str.strip, (args.codecs or "").split(",")) if name] or None
    work = partial(function, source, to, max_shard_bytes=size, codecs=codecs, overwrite=args.overwrite, **how)
    jobs = jobs_for(args.jobs, source)
    log = logging.getLogger("shardkeep")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        # Processes first: there must be no thread that draws when they are forked.
        with path_hints(source), sharing(jobs, work, source, to) as run, out.byte_bar(function.__name__) as update:
            return run(progress=lambda done, total: update(completed=done, total=total))
    finally:
        log.setLevel(before)


def _print_written(report: ExportReport | ConvertReport, what: str, *, native: bool) -> None:
    print(f"{out.styled('wrote', 'green')} {out.printable(report.to)}: {what}")
    speed = out.format_speed(report.bytes_written, report.seconds)
    print(f"  written, read back and compared: equal{speed}")
    if report.decrypted:
        hint = "; --codecs aes encrypts it" if native else ""
        out.echo_err(f"the source is encrypted, this copy is not{hint}", "yellow")


def parse_rename(text: str) -> tuple[str, str]:
    """Return the pair in `s/RE/TEXT/`; any punctuation may replace the slash."""
    parts = text[2:].split(text[1]) if len(text) > 3 and text[0] == "s" and not text[1].isalnum() else []
    if len(parts) != 3 or parts[2] not in {"", "g"} or not parts[0]:
        raise out.UsageError(f"--rename {text!r} is invalid", hint=r"write 's/REGULAR EXPRESSION/TEXT/', as in sed")
    return parts[0], parts[1]


@command(
    argument("path", metavar="PATH", nargs="+", help="checkpoints, runs, or folders of runs"),
    examples="""
  SHARDKEEP_KEY_FILE=keys shardkeep rotate runs/a      put the new key first
  SHARDKEEP_KEY_FILE=keys shardkeep rotate runs/a/step-500
""",
)
def rotate(args: argparse.Namespace) -> int:
    documents: dict[str, list[dict[str, Any]]] = {}
    for path in args.path:
        found = open_checkpoint_or_run(path)
        paths = [path]
        if isinstance(found, Run):
            paths = [run.path_to(each.name) for run in (found, *found.runs) for each in run.entries if each.committed]
        documents[path] = list(map(_rotate, paths))
    plain = [path for path, below in documents.items() if all(each["status"] == "plain" for each in below)]
    every = [each for below in documents.values() for each in below]
    failed = [each for each in every if each["status"] == "failed"]
    code = 2 if failed or plain else 0
    if args.json:
        return out.print_json({"rotated": code == 0, "checkpoints": every}, code)
    for each in every:
        if each["status"] != "failed":
            style = out.styled(each["status"], "green" if each["status"] == "rotated" else "dim")
            print(f"{style}  {out.printable(each['path'])}")
    for each in failed:
        out.echo_err(f"failed   {out.printable(each['path'])}: {out.printable(each['reason'])}", "red")
    print(f"\n{out.format_count(sum(each['status'] == 'rotated' for each in every), 'checkpoint')} rotated")
    for path in plain:
        why = "it is not encrypted" if documents[path] else "there is no checkpoint in it"
        out.echo_err(f"{out.printable(path)}: nothing was rotated: {why}", "red")
    return code


def _rotate(path: str) -> dict[str, Any]:
    """Rotate one checkpoint. If it is plain or cannot be rotated, that is returned, and the others go on."""
    try:
        return {"path": path, "status": "rotated" if rotate_keys(path) else "current"}
    except StateError:
        return {"path": path, "status": "plain"}
    except CheckpointError as exc:
        return {"path": path, "status": "failed", "reason": exc.message}
