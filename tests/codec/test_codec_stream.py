"""Codecs as a stream extension: through DCP's writers and readers, and against streams that were cut or changed."""

import io
import os
import pickle

import pytest
import torch

from shardkeep import dcp
from shardkeep.codecs.base import FRAME_NBYTES
from shardkeep.codecs.stream_extensions import (
    CodecStream,
    ExtensionRegistry,
    ZStandard,
    transformed_input,
    transformed_output,
)
from shardkeep.errors import DamagedFrame, KeyMissing, UnknownExtension, WrongKey
from tests.codec.frames import KEYS, OTHER_KEYS, numbers
from tests.codec.samples import Raw

WEIGHTS = numbers("bf16", FRAME_NBYTES)  # two frames
SIZES = [0, 1, FRAME_NBYTES - 1, FRAME_NBYTES, FRAME_NBYTES + 1, 2 * FRAME_NBYTES]


def reading(keys=KEYS):
    known = ExtensionRegistry()
    known.register(CodecStream.reading_with(keys))
    return known


def written(extensions, data, piece=300_001):
    raw = Raw()
    out, descriptors = transformed_output(extensions, raw)
    for at in range(0, len(data), piece):
        out.write(data[at : at + piece])
    out.close()
    return raw.getvalue(), descriptors


@pytest.mark.parametrize("codecs", [["zstd"], ["float", "aes"], []], ids="-".join)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(codecs, size):
    """
    Streams of no, one and several frames, written and read in pieces that are not frames.
    """
    data = WEIGHTS[:size]
    for piece in (300_001, 3 * FRAME_NBYTES):
        file, descriptors = written([CodecStream(codecs, keys=KEYS)], data, piece)
        stream = transformed_input(reading(), descriptors, Raw(file))
        assert b"".join(iter(lambda: stream.read(100_003), b"")) == data  # noqa: B023 - read at once


@pytest.mark.filterwarnings("ignore:torch.distributed is not in use")
def test_values_through_dcp(tmp_path, monkeypatch):
    """
    A state is saved through two extensions by our writer and read by our reader, which has its key from the environment.
    """
    state = {"w": torch.randn(300_000).bfloat16(), "n": {"step": 3, "m": torch.arange(5)}}
    extension = pickle.loads(pickle.dumps(CodecStream(["float", "aes"], keys=KEYS)))  # as it travels
    writer = dcp.FileSystemWriter(tmp_path / "ck", _extensions=[ZStandard(), extension])
    dcp.save(state, storage_writer=writer, no_dist=True)
    [file] = (tmp_path / "ck").glob("*.distcp")
    assert os.path.getsize(file) < 0.7 * state["w"].nbytes
    assert state["w"][:8].view(torch.uint8).numpy().tobytes() not in file.read_bytes()

    def load(**how):
        filled = {
            "w": torch.zeros(300_000, dtype=torch.bfloat16),
            "n": {"step": 0, "m": torch.zeros(5, dtype=torch.int64)},
        }
        dcp.load(filled, storage_reader=dcp.FileSystemReader(tmp_path / "ck", **how), no_dist=True)
        assert torch.equal(filled["w"], state["w"])
        assert filled["n"]["step"] == 3
        assert torch.equal(filled["n"]["m"], state["n"]["m"])

    load(_extension_registry=reading())
    with pytest.raises(dcp.CheckpointException, match="no key was given") as caught:
        load()
    assert "SHARDKEEP_KEY_FILE" in str(caught.value)
    (tmp_path / "key").write_text(bytes(range(32)).hex())
    monkeypatch.setenv("SHARDKEEP_KEY_FILE", str(tmp_path / "key"))
    load()
    monkeypatch.delenv("SHARDKEEP_KEY_FILE")
    monkeypatch.setenv("SHARDKEEP_KEY", bytes(range(32)).hex())
    load()


def test_who_may_read():
    """
    With another key or none it is refused; without encryption a key file that is gone does not matter.
    """
    file, descriptors = written([CodecStream(["aes"], keys=KEYS)], b"abc")
    with pytest.raises(WrongKey):
        transformed_input(reading(OTHER_KEYS), descriptors, Raw(file))
    with pytest.raises(KeyMissing):
        transformed_input(ExtensionRegistry(), descriptors, Raw(file))
    with pytest.MonkeyPatch.context() as patch:
        file, descriptors = written([CodecStream(["zstd"])], b"abc")
        patch.setenv("SHARDKEEP_KEY_FILE", "/nowhere")
        assert transformed_input(ExtensionRegistry(), descriptors, Raw(file)).read() == b"abc"


@pytest.mark.parametrize("codecs", [["zstd"], ["aes"]], ids="-".join)
def test_streams_that_were_cut_or_have_more(codecs):
    """
    Also where the cut is between two frames, or before the empty one that ends every stream.
    """
    data = WEIGHTS[: 2 * FRAME_NBYTES]
    file, descriptors = written([CodecStream(codecs, keys=KEYS)], data)
    first = 16 + 16 + int.from_bytes(file[24:32], "little")
    second = first + 16 + int.from_bytes(file[first + 8 : first + 16], "little")
    for broken in (b"", file[:20], file[:100], file[:first], file[:second], file[:-1], file + b"\0"):
        with pytest.raises(DamagedFrame):
            transformed_input(reading(), descriptors, Raw(broken)).read()
    if codecs == ["aes"]:
        swapped = file[:16] + file[first:second] + file[16:first] + file[second:]
        skipped = file[:16] + file[first:]
        ended = file[:16] + file[16:first] + file[second:]
        elsewhere = written([CodecStream(codecs, keys=KEYS)], data)[0][:first] + file[first:]
        for broken in (swapped, skipped, ended, elsewhere):
            with pytest.raises(DamagedFrame):
                transformed_input(reading(), descriptors, Raw(broken)).read()


def test_sizes_that_no_frame_has():
    """
    A stream that says its next frame has 4 EB is refused before room is made for it.
    """
    file, descriptors = written([CodecStream(["zstd"])], b"abc")
    for nbytes, stored in [(1 << 62, 1 << 62), (3, 1 << 62), (3, 5)]:
        broken = file[:16] + nbytes.to_bytes(8, "little") + stored.to_bytes(8, "little") + file[32:]
        with pytest.raises(DamagedFrame, match="of a size that none has"):
            transformed_input(ExtensionRegistry(), descriptors, Raw(broken)).read()


@pytest.mark.parametrize("version", ["", "2:[]", "1", "1:{", "1:3", "1:" + "[" * 100_000])
def test_descriptors_that_make_no_sense(version):
    """
    One of another version, or that is not what was recorded, is an unknown extension.
    """
    with pytest.raises(UnknownExtension):
        transformed_input(ExtensionRegistry(), [f"stream.shardkeep/{version}"], io.BytesIO())
