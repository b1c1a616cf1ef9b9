"""What differs from run to run is masked before the output of a command is compared with the documentation."""

import re

_MASKS = [
    (r"\x1b\[[0-9;]*m", ""),
    # Names that carry the id of a save are shortened in the middle where a line is too long.
    (r"\b[0-9a-f]{20}\b", "<id>"),
    (r"…[0-9a-f]{2,20}\.", "…."),
    (r"-[0-9a-f]{0,19}…", "-…"),
    (r"xxh3_128:[0-9a-f]{32}", "<digest>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+\d\d:\d\d|Z)?", "<time>"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "<time>"),
    (r"(/private)?/tmp/[\w./-]*?/(?=runs|models|ckpt|there)", ""),
    (r"\(pid \d+\)", "(pid <pid>)"),
    (r"process \d+ on \S+,", "process <pid> on <machine>,"),
    (r"\b\d+(\.\d+)? (?:s|ms|µs|min|h|d)\b", "<span>"),
    (r"\b\d+(\.\d+)? [kMG]?B/s", "<speed>"),
    (r"(?: in|,) <span>, <speed>$", ""),  # said only of what took a while
    (r" \(<span> by earlier saves\)", ""),
    (r"\bshardkeep \d+\.\d+\.\d+\w*", "shardkeep <version>"),
    (r"┤.*", "┤"),  # of a histogram: how many numbers fall to which side depends on their last digits
    # Columns move with what is in them.
    (r"[ \t]+", " "),
    (r" $", ""),
]
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{4,}(?:e[+-]?\d+)?")


def masked(text: str) -> str:
    """Return what should be the same in every run, on every machine."""
    text = text.replace("\r\n", "\n").strip("\n")
    for pattern, mask in _MASKS:
        text = re.sub(pattern, mask, text, flags=re.MULTILINE)
    # The last digits of a sum depend on the processor.
    return _NUMBER.sub(lambda found: f"{float(found.group()):.3g}", text)
