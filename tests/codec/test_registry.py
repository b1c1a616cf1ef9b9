"""Codecs of users: registered by a program, or brought by a package, they can do all that ours can."""

import sys
from importlib.metadata import EntryPoint

import pytest

from shardkeep.codecs import chain as known
from shardkeep.codecs.base import CodecConfig
from shardkeep.codecs.chain import CodecChain, find_codec, register_codec
from shardkeep.errors import CodecFailed, DamagedFrame, InvalidCodec, PackageMissing, UnknownCodec
from tests.codec.frames import KEYS, Shout, ShoutCodec, coded, decoded


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(known, "_registered", {})


def test_a_codec_of_a_program(fresh):
    """By name, with an argument or as a config, in the middle of a chain; only its parameters are recorded."""
    with pytest.raises(UnknownCodec, match="the codecs are aes, float, lz4, zstd"):
        CodecChain.begin(["shout"])
    assert register_codec(Shout) is Shout
    for way in ("shout:7", Shout(mask=7)):
        chain = CodecChain.begin(["zstd", way, "aes"], keys=KEYS)
        assert chain.recorded[1] == {"name": "shout", "version": 1, "mask": 7}
        assert decoded(CodecChain.opened(chain.recorded, keys=KEYS), coded(chain, b"abc" * 99), 297) == b"abc" * 99
    alone = CodecChain.begin([Shout()])
    with pytest.raises(
        DamagedFrame, match=r"frame 4 of save-1/0.* cannot be read by the codec 'shout': ValueError\('not this frame'\)"
    ):
        decoded(alone, coded(alone, b"abc"), 3, number=4)


def test_a_codec_that_breaks_its_word(fresh):
    """More than its bound, more or less than was written, or an error: each is reported, with the codec."""

    class Wrong(Shout, frozen=True):
        name = "wrong"

        @classmethod
        def open(cls, recorded, keys):
            return codec

    class WrongCodec(ShoutCodec):
        grows = bound_is = 0
        gives = None

        def bound(self, nbytes):
            return nbytes + self.bound_is

        def encode(self, data, place):
            return bytes(len(data) + self.grows) if self.grows is not None else 1 / 0

        def decode(self, data, place, most_nbytes):
            return bytes(self.gives)

    codec = WrongCodec(0)
    register_codec(Wrong)
    chain = CodecChain.begin(["wrong"])
    codec.grows = 1
    with pytest.raises(CodecFailed, match=r"'wrong' made 4 bytes of 3 from .*; its bound is 3"):
        coded(chain, b"abc")
    codec.grows = None
    with pytest.raises(CodecFailed, match=r"'wrong' failed on frame 3 of .* ZeroDivisionError"):
        coded(chain, b"abc")
    for gives, says in [
        (4, "became 4 bytes in the codec 'wrong', expected at most 3"),
        (2, "became 2 bytes instead of 3"),
    ]:
        codec.gives = gives
        with pytest.raises(DamagedFrame, match=says):
            decoded(chain, b"abc", 3)


def test_what_cannot_be_registered(fresh):
    class Zstd(CodecConfig, frozen=True):
        name = "zstd"

    class Nameless(CodecConfig, frozen=True):
        pass

    class Colon(CodecConfig, frozen=True):
        name = "a:b"

    for wrong, says in [
        (Zstd, "codec of shardkeep"),
        (Nameless, "name"),
        (Colon, "colon"),
        (int, "subclass"),
        (3, "3 is not"),
    ]:
        with pytest.raises(InvalidCodec, match=says):
            register_codec(wrong)

    class Unfinished(CodecConfig, frozen=True):
        name = "unfinished"

    register_codec(Unfinished)
    with pytest.raises(NotImplementedError, match="Unfinished does not implement open"):
        CodecChain.begin(["unfinished"])


def test_a_codec_of_a_package(fresh, tmp_path, monkeypatch):
    """An installed distribution with an entry point is enough; it is imported when it is asked for."""
    (tmp_path / "their_codecs.py").write_text("from tests.codec.frames import Shout\n")
    info = tmp_path / "their_codecs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-codecs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[shardkeep.codecs]\nshout = their_codecs:Shout\nnothing = their_codecs:__name__\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    CodecChain.begin(["zstd"])
    assert "their_codecs" not in sys.modules
    chain = CodecChain.begin(["shout"])
    assert decoded(CodecChain.opened(chain.recorded), coded(chain, b"abc"), 3) == b"abc"
    assert sys.modules.pop("their_codecs").Shout is Shout
    with pytest.raises(InvalidCodec, match="not a codec of this name"):
        CodecChain.begin(["nothing"])
    with pytest.raises(UnknownCodec, match="the codecs are aes, float, lz4, nothing, shout, zstd"):
        CodecChain.begin(["zap"])


def test_entry_points_do_not_replace_ours(fresh, monkeypatch):
    entry = EntryPoint("zstd", "tests.codec.frames:Shout", known.GROUP)
    monkeypatch.setattr(known, "entry_points", lambda **_: [entry])
    assert find_codec("zstd").__module__ == "shardkeep.codecs.compression"


@pytest.mark.parametrize(
    ("codec", "hidden", "extra"),
    [
        ("zstd", ["compression.zstd", "backports.zstd"], "zstd"),
        ("float", ["compression.zstd", "backports.zstd"], "zstd"),
        ("lz4", ["lz4.block"], "lz4"),
        ("aes", ["cryptography.hazmat.primitives.ciphers"], "crypto"),
    ],
)
def test_a_package_that_is_not_installed(codec, hidden, extra, monkeypatch):
    """The error says what to install, when a checkpoint is begun and when one is read."""
    from shardkeep.codecs.compression import zstd_module

    chain = CodecChain.begin([codec], keys=KEYS)
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    zstd_module.cache_clear()
    try:
        with pytest.raises(PackageMissing) as begun:
            CodecChain.begin([codec], keys=KEYS)
        with pytest.raises(PackageMissing) as opened:
            decoded(CodecChain.opened(chain.recorded, keys=KEYS), b"", 0)
    finally:
        zstd_module.cache_clear()
    assert begun.value.hint == opened.value.hint == f"pip install 'shardkeep[{extra}]'"
    assert isinstance(begun.value, ImportError)
