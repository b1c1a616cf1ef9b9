"""The zstd extension, alone and with torch's own."""

import io
import pickle
import tracemalloc

import pytest

from shardkeep.codecs import stream_extensions
from shardkeep.codecs.compression import zstd_module
from shardkeep.codecs.stream_extensions import ExtensionRegistry, ZStandard
from shardkeep.errors import CheckpointError, MalformedFile, UnknownExtension
from tests.codec.samples import DATA, NOISE, Raw


def compressed(data, extension=None, piece=50_000):
    held = Raw()
    stream = (extension or ZStandard()).transform_to(held)
    for start in range(0, len(data), piece):
        stream.write(data[start : start + piece])
    stream.close()
    return held.getvalue()


def decompressed(data, extension=None):
    stream = (extension or ZStandard()).transform_from(io.BytesIO(data))
    return b"".join(iter(lambda: stream.read(70_001), b""))


@pytest.mark.parametrize("name", DATA)
def test_torch_reads_ours_and_we_read_torchs(name):
    from torch.distributed.checkpoint._extension import ZStandard as Theirs

    if not Theirs.is_available():
        pytest.skip("torch needs the module zstandard or pyzstd for its own")
    assert decompressed(compressed(DATA[name]), Theirs()) == DATA[name]
    assert decompressed(compressed(DATA[name], Theirs())) == DATA[name]


def test_flushing_makes_everything_readable_in_one_frame():
    """After a flush all data are in the file; torch reads one frame only, so it is still one after several flushes."""
    raw = Raw()
    stream = ZStandard().transform_to(raw)
    stream.write(b"abc" * 100)
    stream.flush()
    before = len(raw.getvalue())
    stream.flush()
    assert len(raw.getvalue()) == before
    assert ZStandard().transform_from(Raw(raw.getvalue())).read(300) == b"abc" * 100
    stream.write(b"def")
    stream.flush()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"x")
    frame = zstd_module().ZstdDecompressor()
    data = frame.decompress(raw.getvalue())
    assert (data, frame.unused_data) == (b"abc" * 100 + b"def", b"")


def test_frames_one_after_another_are_one_stream():
    """Torch's extension ends a frame at each flush with one of its modules; all of them are read."""
    file = b"".join(compressed(data) for data in (b"abc", b"", NOISE[:200_000], b"z"))
    assert decompressed(file) == b"abc" + NOISE[:200_000] + b"z"


@pytest.mark.parametrize("cut", [1, 5, 100, 150_000, -1])
def test_a_stream_cut_short_is_an_error(cut):
    file = compressed(NOISE[:200_000])
    with pytest.raises(MalformedFile, match="ends inside a frame"):
        decompressed(file[:cut])


def test_what_is_not_zstd_is_an_error():
    for file in (b"not zstd at all", compressed(b"abc") + b"garbage behind it"):
        with pytest.raises(MalformedFile, match="damaged, or is not zstd"):
            decompressed(file)


def test_zeros_do_not_fill_the_memory():
    """A gigabyte of zeros is 32 KiB of zstd; reading a little of it needs little memory."""
    file = compressed(bytes(16 << 20), piece=1 << 20) * 64
    tracemalloc.start()
    try:
        stream = ZStandard().transform_from(io.BytesIO(file))
        assert sum(len(stream.read(1 << 20)) for _ in range(8)) == 8 << 20
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def test_where_no_module_is_installed(monkeypatch):
    """It says so, and making or reading one is the ValueError that it is in torch."""
    monkeypatch.setattr(stream_extensions, "zstd_module", lambda: None)
    assert not ZStandard.is_available()
    for make in (ZStandard, lambda: ZStandard.from_descriptor("1")):
        with pytest.raises(ValueError, match="there is no module named") as caught:
            make()
        assert isinstance(caught.value, UnknownExtension)
        assert "pip install" in caught.value.hint
    assert "stream.zstd" in ExtensionRegistry().extensions


def test_descriptors():
    """The stored name is torch's; versions 1 and 1.x are read; an unknown name or version is torch's ValueError."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry as TheirRegistry
    from torch.distributed.checkpoint._extension import ZStandard as Theirs

    assert ZStandard.is_available()
    assert ZStandard.registry_name() == Theirs.registry_name()
    assert ZStandard().get_descriptor() == Theirs.get_descriptor(ZStandard()) == "stream.zstd/1"
    made = ExtensionRegistry().from_descriptor_list(["stream.zstd/1", "stream.zstd/1.9"])
    assert [type(each) for each in made] == [ZStandard] * 2
    for registry in (ExtensionRegistry(), TheirRegistry()):
        for descriptor, words in {
            "stream.zstd/2": "Unknown extension version='2'",
            "stream.zstd": "Unknown extension version=''",
            "stream.gzip/1": "Unknown extension name='stream.gzip'",
            "stream.zstd@home/1": "Unknown extension name='stream.zstd@home'",
        }.items():
            with pytest.raises(ValueError, match=words) as caught:
                registry.from_descriptor_list([descriptor])
            assert isinstance(caught.value, CheckpointError) == isinstance(registry, ExtensionRegistry)


def test_it_travels_to_other_processes():
    again = pickle.loads(pickle.dumps(ZStandard()))
    assert decompressed(compressed(b"abc", again)) == b"abc"
