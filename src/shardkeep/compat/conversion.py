"""
Conversion between files of `torch.save` and checkpoints, in either direction and in bounded memory.
"""

from __future__ import annotations

import os

import torch

from shardkeep.compat.conversion_checkpoint import CheckpointTensors
from shardkeep.compat.conversion_source import load_torch_file
from shardkeep.compat.save_driver import _save_state_dict
from shardkeep.exchange.archive_file import Part, destination, write_archive
from shardkeep.exchange.archive_pickle import StandIn, pickle_state
from shardkeep.format.torch_archive_writer import ArchiveLayout
from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.stage.memory import view_memory
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.file_writer import FileSystemWriter


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """
    Convert a checkpoint into a file that `torch.load` reads: nested as the state that was saved, tensors whole.

    The file replaces what is at its place, once it is complete. Objects are held in memory; of tensors, two windows
    are, or one whole tensor where it was saved through an extension.

    Args:
        dcp_checkpoint_dir: the checkpoint's directory, or the URL of its place.
        torch_save_path: the file to write: a path or a URL.

    Raises:
        CheckpointException: the checkpoint cannot be read.
        StorageError: the file cannot be written.

    """
    path = destination(torch_save_path)
    checkpoint = CheckpointTensors(FileSystemReader(dcp_checkpoint_dir))
    pickled = pickle_state(checkpoint.read_state())
    storages = pickled.storages

    def fill(parts: list[Part]) -> None:
        stored: list[tuple[StandIn, Part]] = []
        for part in parts:
            storage = storages[part.storage]
            if isinstance(storage, StandIn):
                stored.append((storage, part))
            else:
                part.into[:] = _bytes_of(storage)[part.start : part.stop]
        checkpoint.fill(stored)

    sizes = [each.nbytes if isinstance(each, StandIn) else each.nbytes() for each in storages]
    write_archive(path, ArchiveLayout(pickled.data, sizes), fill)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """View a storage that came with an object."""
    return view_memory(storage.data_ptr(), storage.nbytes())


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """
    Convert a file of `torch.save` into a checkpoint.

    The file is mapped and not read into memory, unless it has the form that torch wrote before version 1.6, or is in a
    store. A checkpoint that is at the place is replaced, once the new one is complete.

    Args:
        torch_save_path: the file, by its path or URL; its top-level value must be a dict.
        dcp_checkpoint_dir: the directory to write the checkpoint to, or the URL of a place.

    Raises:
        PickleRefused: the file names a class that is not known to be safe.
        DamagedCheckpoint: the file is no file of `torch.save`, or is damaged.
        CheckpointException: the checkpoint cannot be written.

    """
    state = load_torch_file(torch_save_path)
    if not isinstance(state, dict):
        raise BrokenProtocol(
            f"{os.fspath(torch_save_path)} holds a {type(state).__qualname__}, and a checkpoint is made from a dict",
            hint="load the file, put its value into a dict, and save that",
        )
    _save_state_dict(state, storage_writer=FileSystemWriter(dcp_checkpoint_dir), no_dist=True)
