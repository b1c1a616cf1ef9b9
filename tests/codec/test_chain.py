"""Any number of extensions on one stream: what is written through them is what is read, in torch's order."""

import gc
import io
import itertools

import pytest

from shardkeep.codecs.stream_extensions import (
    ZStandard,
    _StorageReaderTransforms,
    _StorageWriterTransforms,
    transformed_input,
    transformed_output,
)
from tests.codec.samples import DATA, KINDS, NOISE, Cascade, Raw, Tail, Xor, registry

CHAINS = [chain for length in range(4) for chain in itertools.permutations(KINDS, length)]


def written(kinds, data, piece=None):
    raw = Raw()
    out, descriptors = transformed_output([kind() for kind in kinds], raw)
    for start in range(0, len(data), piece or len(data) or 1):
        assert out.write(memoryview(data)[start : start + (piece or len(data))]) > 0
    out.close()
    out.close()
    assert raw.closes == 0
    return raw.getvalue(), descriptors


@pytest.mark.parametrize("kinds", CHAINS, ids=lambda kinds: "-".join(kind.__name__ for kind in kinds) or "none")
def test_what_is_written_is_read(kinds):
    """Through no, one, two or three extensions, in every order, data comes back as it was."""
    for data in (DATA["empty"], DATA["words"], NOISE[:5000]):
        file, descriptors = written(kinds, data, piece=777)
        assert transformed_input(registry(), descriptors, Raw(file)).read(-1) == data


@pytest.mark.parametrize("name", DATA)
def test_large_data_and_every_way_to_read(name):
    data = DATA[name]
    file, descriptors = written([Xor, ZStandard], data, piece=1 << 20)

    def opened():
        return transformed_input(registry(), descriptors, Raw(file))

    assert opened().read() == data
    stream = opened()
    pieces = list(iter(lambda: stream.read(100_003), b""))
    assert b"".join(pieces) == data
    assert all(len(piece) == 100_003 for piece in pieces[:-1])
    assert stream.read(1) == stream.read(-1) == b""
    stream = opened()
    assert b"".join(stream.read(1) for _ in range(300)) == data[:300]
    held = bytearray(len(data) + 10)
    assert opened().readinto(held) == len(data)
    assert held == data + bytes(10)


@pytest.mark.parametrize("kinds", [c for c in CHAINS if Tail not in c or len(c) < 3], ids=str)
def test_files_are_those_of_torch(kinds):
    """Extensions transform data in the order of torch's writer, and leave the same descriptors."""
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms as Theirs

    data = DATA["words"]
    raw = io.BytesIO()
    out, descriptors = Theirs([kind() for kind in kinds]).transform_save_stream(None, raw)
    out.write(data)
    # Torch closes the outermost only, and some of these do not pass that on: closed from here, where they have it.
    while out is not None:
        out.close()
        out = getattr(out, "output", None) or getattr(out, "_output", None) or getattr(out, "other", None)
    assert written(kinds, data) == (raw.getvalue(), descriptors)


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_torch_reads_one_extension_of_ours(kind):
    """With one extension, or none, torch's reader and ours read the same file."""
    from torch.distributed.checkpoint._extension import StreamTransformExtension as TheirKind
    from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms as Theirs

    if kind:
        TheirKind.register(kind)  # torch passes over what is not of its class
    file, descriptors = written([kind] if kind else [], DATA["words"])
    theirs = Theirs(registry()).transform_load_stream(None, descriptors, io.BytesIO(file))
    assert theirs.read(-1) == DATA["words"]


def test_torchs_own_extension_and_registry_are_taken():
    """Torch's example extension, a class of torch's tree, is written and read through our chain with two of ours."""
    from torch.testing._internal.distributed.checkpoint_utils import Rot13Example, get_test_extension_registry

    known = get_test_extension_registry()
    for kind in (Xor, ZStandard):
        known.register(kind)
    for order in itertools.permutations([Rot13Example(), Xor(), ZStandard()]):
        raw = Raw()
        out, descriptors = _StorageWriterTransforms(order).transform_save_stream(None, raw)
        with out:
            out.write(DATA["words"])
        read = _StorageReaderTransforms(known).transform_load_stream(None, descriptors, Raw(raw.getvalue()))
        assert read.read() == DATA["words"]


def test_a_tensor_saved_and_loaded_through_three():
    import torch

    tensor = torch.arange(100_000)
    raw = Raw()
    out, descriptors = transformed_output([Xor(), ZStandard(), Cascade()], raw)
    torch.save(tensor, out)
    out.close()
    stream = transformed_input(registry(), descriptors, Raw(raw.getvalue()))
    assert not stream.seekable()
    assert torch.equal(torch.load(io.BytesIO(stream.read())), tensor)


def test_streams_that_can_seek_still_can():
    """Where every extension can go to any place, so can the result; `torch.load` then reads straight from it."""
    import torch

    from shardkeep.testing.checkpoint_utils import Rot13Example, get_test_extension_registry

    raw = Raw()
    out, descriptors = transformed_output([Rot13Example(), Rot13Example()], raw)
    torch.save(torch.ones(5), out)
    out.close()
    stream = transformed_input(get_test_extension_registry(), descriptors, Raw(raw.getvalue()))
    assert stream.seekable()
    assert torch.equal(torch.load(stream), torch.ones(5))
    stream.seek(2)
    assert (stream.tell(), stream.read(2)) == (2, b"\x03\x04")


def test_items_one_after_another_in_one_file():
    from shardkeep.dcp._impl.file_reader import _create_file_view

    raw, places = Raw(), []
    for data in DATA.values():
        start = raw.tell()
        out, descriptors = transformed_output([Xor(), ZStandard()], raw)
        out.write(data)
        out.close()
        places.append((start, raw.tell() - start, data))
    for start, length, data in reversed(places):
        view = _create_file_view(raw, start, length)
        assert transformed_input(registry(), descriptors, view).read() == data


def test_a_full_disk_is_reported_by_close_at_the_latest():
    """An error of the file reaches who writes, also one that comes when the last layer is flushed."""

    class Full(Raw):
        def write(self, data):
            raise OSError(28, "No space left on device")

    for chain in ([Tail()], [ZStandard(), Xor()], []):
        with pytest.raises(OSError, match="No space left"), transformed_output(chain, Full())[0] as out:
            out.write(b"12345")


def test_reading_leaves_the_file_open():
    """Closing what was read, or letting it go, does not close the file it was read from."""
    file, descriptors = written([Xor, Cascade], b"abc")
    raw = Raw(file)
    with transformed_input(registry(), descriptors, raw) as stream:
        assert stream.read() == b"abc"
    transformed_input(registry(), descriptors, raw)
    gc.collect()
    assert raw.closes == 0


def test_without_extensions_the_file_itself_is_read():
    """No descriptors, no layer."""
    raw = Raw(b"abc")
    assert transformed_input(registry(), (), raw) is raw


def test_an_extension_that_changes_no_stream_is_passed_over():
    """As in torch: what has a name in the registry, and nothing to do with streams, is let be."""
    known = registry()
    known.extensions["mark"] = type("Mark", (), {"from_descriptor": staticmethod(lambda version: object())})
    file, descriptors = written([Xor], b"abc")
    assert transformed_input(known, ["mark/1", *descriptors], Raw(file)).read() == b"abc"
