"""`shardkeep export`: the weights of a checkpoint for Hugging Face, or as one file for `torch.load`."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from shardkeep.cli.output import (
    ReadProgress,
    UsageError,
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
  shardkeep export runs/a/step-500 out/model --dtype bf16 --config base-model
  shardkeep export runs/a/step-500 out --rename 's/^net\\.//' --exclude '*.ema'
  shardkeep export runs/a/step-500 out/model.pt --format torch
"""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_MOST_SHOWN = 4
_MIN_TIMED_S = 0.5
"""What takes less says nothing about the speed of a disk."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="native, torch DCP, or safetensors files")
    parser.add_argument("to", metavar="TO", help="a directory (hf), or a file (torch)")
    parser.add_argument("--format", choices=("hf", "torch", "native"), default="hf", help="what to write (default: hf)")
    parser.add_argument("--dtype", metavar="TYPE", help="bf16, fp16, fp32: what floating point weights become")
    parser.add_argument("--shard-size", metavar="SIZE", default="5GB", help="how large a file may be (default: 5GB)")
    parser.add_argument("--include", metavar="GLOB", action="append", help="only these names (may be repeated)")
    parser.add_argument("--exclude", metavar="GLOB", action="append", help="not these names (may be repeated)")
    parser.add_argument(
        "--rename", metavar="s/RE/TEXT/", action="append", help="change names by a regular expression (may be repeated)"
    )
    parser.add_argument("--prefix", metavar="TEXT", help="only names that begin so, without it (default: model.)")
    parser.add_argument("--config", metavar="DIR", help="copy config.json, tokenizer and all but weights from there")
    parser.add_argument("--codecs", metavar="NAMES", help="for native: what files go through, such as float,aes")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at TO")


def run(args: argparse.Namespace) -> int:
    """Write it, and say what was written."""
    from shardkeep.conversion.api import export  # noqa: PLC0415 - it imports torch, which --help need not wait for

    renames = [parse_rename(text) for text in args.rename or ()]
    size = parse_size(args.shard_size)
    with ExitStack() as stack, quiet_log(), path_hints(args.checkpoint):
        report = export(
            args.checkpoint,
            args.to,
            format=args.format,
            dtype=args.dtype,
            max_shard_bytes=size,
            include=args.include,
            exclude=args.exclude,
            rename=renames or None,
            prefix=args.prefix,
            config=args.config,
            codecs=parse_codecs(args.codecs),
            overwrite=args.overwrite,
            progress=TransferProgress(stack, "export"),
        )
    if args.json:
        print_json({**asdict(report), "gb_per_s": report.gb_per_s})
        return 0
    what = f"{format_count(report.tensors, 'tensor')}, {format_size(report.bytes_written)}"
    files = format_count(len(report.files), "file")
    echo(f"{styled('wrote', 'green')} {printable(report.to)}: {what} in {files}")
    echo(checked_text(report.seconds, report.gb_per_s))
    for name, owner in list(report.ties.items())[:_MOST_SHOWN]:
        echo(
            f"  {printable(name)} is tied to {printable(owner)}"
            + (" and not stored twice" if args.format == "hf" else "")
        )
    if report.decrypted:
        warn_decrypted(can_be=args.format == "native")
    if report.left_out:
        echo_err(f"left out, as safetensors files hold tensors only: {_some(report.left_out)}", "yellow")
    if report.infinite:
        wider = "fp32" if args.dtype in {"bf16", "bfloat16"} else "fp64" if "32" in args.dtype else "bf16"
        echo_err(
            f"numbers too large for {args.dtype} are infinite now in {_some(report.infinite)}; try --dtype {wider}",
            "yellow",
        )
    return 0


def checked_text(seconds: float, gb_per_s: float) -> str:
    """Say that all was read back, and how fast all this was if it took long enough to tell."""
    speed = f" in {seconds:.1f} s, {gb_per_s:.2f} GB/s" if seconds >= _MIN_TIMED_S else ""
    return f"  written, read back and found equal{speed}"


def warn_decrypted(*, can_be: bool) -> None:
    """Say that a copy is not encrypted as its source is, and how it can be, if at all."""
    echo_err(f"the source is encrypted, this copy is not{'; --codecs aes encrypts it' if can_be else ''}", "yellow")


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep the library's log from saying what the command says itself."""
    log = logging.getLogger("shardkeep")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class TransferProgress:
    """Told of bytes done and to do; draws a bar until the stack ends, if somebody looks."""

    def __init__(self, stack: ExitStack, what: str) -> None:
        self._stack = stack
        self._what = what
        self._bar: ReadProgress | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._stack.enter_context(ReadProgress(self._what, total))
        self._bar.add(done - self._done)
        self._done = done


def parse_size(text: str) -> float:
    """Return the bytes that a text such as 5GB or 512MiB means."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"{text!r} is no size", hint="write 500MB, 5GB or 2GiB")
    base = 1024 if found[3] else 1000
    return float(found[1]) * float(base ** " kmgt".index(found[2].lower() or " "))


def parse_codecs(text: str | None) -> list[str] | None:
    """Return the codecs that a text such as float,zstd:3 names."""
    return [name for name in map(str.strip, text.split(",")) if name] if text else None


def parse_rename(text: str) -> tuple[str, str]:
    """Return the pair that `s/RE/TEXT/` means; any sign may stand for the slash."""
    parts = text[2:].split(text[1]) if len(text) > 3 and text[0] == "s" and not text[1].isalnum() else []
    if len(parts) != 3 or parts[2] not in {"", "g"} or not parts[0]:
        raise UsageError(
            f"--rename {text!r} cannot be understood", hint=r"write 's/REGULAR EXPRESSION/TEXT/', as in sed"
        )
    return parts[0], parts[1]


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(map(printable, names[:_MOST_SHOWN])) + rest
