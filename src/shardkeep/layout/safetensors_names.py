"""The names of Hugging Face's files, and the keys inside their headers that say more than which tensors there are."""

from __future__ import annotations

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
FILE_NAME = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"

CUSTOM_METADATA_KEY = "DCP_SHARDING_INFO"
"""Of a file that a distributed checkpoint wrote: where each of its tensors lies in its whole."""
SAVED_OFFSETS_KEY = "saved_offsets"
FORMAT_KEY = "format"
FORMAT_VALUE = "pt"
SAVE_ID_KEY = "shardkeep.save_id"
"""Which save a file is of, so that files of two saves are never read as one checkpoint."""
FILE_COUNT_KEY = "shardkeep.files"
"""How many files that save has, so that a missing one is known."""


def file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """Return the name of file `index` of `largest_index`, or of one shard of it; all are counted from 1."""
    numbers = {"cpt_idx": f"{index:05}", "num_files": f"{largest_index:05}"}
    if shard_index is None:
        return FILE_NAME.format(**numbers) + SUFFIX
    return SHARDED_FILE_NAME.format(shard_idx=f"{shard_index:05}", **numbers) + SUFFIX


def marked(name: str, save_id: str) -> str:
    """Return the name of a file of a save that no file of another save has."""
    return f"{name.removesuffix(SUFFIX)}-{save_id.replace('-', '')[:8]}{SUFFIX}"
