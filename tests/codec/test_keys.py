"""Users' keys: where they come from, what they wrap, and how they are changed without touching data."""

import base64
import copy
import pathlib
import pickle
import traceback

import pytest
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

from shardkeep.codecs.base import without_keys
from shardkeep.codecs.chain import CodecChain, rewrapped
from shardkeep.codecs.keys import CachedKeys, KeyRing, key_source, new_key
from shardkeep.errors import InvalidKey, KeyMissing, WrongKey
from tests.codec.frames import KEYS, OTHER_KEYS, coded, decoded, numbers

OLD, NEW = bytes(range(32)), bytes(range(100, 132))


def test_keys_from_a_file(tmp_path):
    """Hex and both kinds of base64, comments, empty lines and Windows' line ends; the first wraps, all unwrap."""
    path = tmp_path / "keys"
    third = bytes([255] * 32)
    lines = ["# ours", NEW.hex().upper(), "", f"  {base64.b64encode(OLD).decode()} "]
    path.write_bytes("\r\n".join([*lines, base64.urlsafe_b64encode(third).decode()]).encode())
    ring = KeyRing.from_file(path)
    assert ring.ids == KeyRing([NEW, OLD, third]).ids
    assert len(set(ring.ids)) == 3
    key_id, wrapped = ring.wrap(bytes(32))
    assert key_id == ring.ids[0]
    assert aes_key_unwrap(NEW, wrapped) == bytes(32)
    for key in (NEW, OLD, third):
        key_id, wrapped = KeyRing([key]).wrap(b"d" * 32)
        assert ring.unwrap(key_id, wrapped) == b"d" * 32


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no key in"),
        ("# only words\n\n", "no key in"),
        ("\nabcdef", "line 2"),
        (NEW.hex()[:-1], "line 1"),
        (base64.b64encode(NEW[:31]).decode(), "line 1"),
        ("correct horse battery staple, thirty-two", "line 1"),
    ],
)
def test_text_that_is_no_key(text, says, tmp_path):
    """The error says which line of which file, and nothing of what stands there: it may be most of a key."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidKey, match=says) as caught:
        KeyRing.from_file(path)
    assert str(path) in str(caught.value)
    words = [word for line in text.splitlines() if line[:1] != "#" for word in line.split() if len(word) > 3]
    assert not any(word in str(caught.value) for word in words)


def test_where_keys_may_come_from(tmp_path):
    """An object, a function, a path; anything else is refused, a key where a path belongs without showing it."""
    path = tmp_path / "keys"
    path.write_text(new_key())
    expected = KeyRing.from_file(path).ids
    for given in (path, str(path), path.read_text, lambda: bytes.fromhex(path.read_text())):
        assert key_source(given).ids == expected
    assert key_source(None) is None
    assert key_source(KEYS) is KEYS
    with pytest.raises(KeyMissing, match="No such file"):
        key_source(tmp_path / "none")
    for wrong in (3, [OLD], OLD):
        with pytest.raises(InvalidKey, match="is not a source of keys"):
            key_source(wrong)
    for key in (OLD.hex(), base64.b64encode(OLD).decode(), f"{OLD.hex()}\n{NEW.hex()}\n"):
        with pytest.raises(InvalidKey, match="path of a key file") as caught:
            key_source(key)
        assert key[:20] not in str(caught.value)
    for few in ([], [OLD[:16]], [OLD.hex()]):
        with pytest.raises(InvalidKey):
            KeyRing(few)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidKey, match="is not text"):
        key_source(path)


@pytest.mark.parametrize("given", [str, pathlib.Path, KeyRing.from_file])
def test_most_of_a_key_where_a_path_belongs_is_not_shown(given, tmp_path, monkeypatch):
    """A digit is missing, or the padding, or it is the second line; "/" is a digit of base64, too. Paths are shown."""
    monkeypatch.chdir(tmp_path)
    slashes = ["/" + base64.b64encode(OLD).decode()[1:-1], base64.b64encode(OLD).decode()[:-1].replace("U", "/")]
    for key in (
        NEW.hex()[:-1],
        base64.b64encode(NEW).decode()[:-1],
        *slashes,
        f"# ours\n{NEW.hex()}",
        NEW.hex() + "00",
    ):
        with pytest.raises(InvalidKey, match="may be a key") as caught:
            key_source(given(key))
        shown = "".join(traceback.format_exception(caught.value))
        assert not any(line[:9] in shown for line in key.splitlines() if line[0] != "#")
    for name in ("short", str(tmp_path / ("k" * 50)), "some/where/else.txt"):
        with pytest.raises(KeyMissing, match=name):
            key_source(given(name))
    (tmp_path / NEW.hex()[:40]).write_text(new_key())
    assert key_source(given(NEW.hex()[:40]))


@pytest.mark.parametrize(("given", "named"), [(None, "None"), (7, "a int"), ([OLD], "a list")])
def test_a_function_that_gives_no_key(given, named):
    """As one that reads an environment variable which is not set."""
    with pytest.raises(KeyMissing, match=f"the function for keys returned {named}\n"):
        key_source(lambda: given)


def test_fresh_keys():
    assert len(KeyRing.from_text(f"{new_key()}\n{new_key()}\n").ids) == 2
    unwrapped = set()
    for _ in range(3):
        remembered = CachedKeys(lambda: KEYS)
        CodecChain.begin(["aes"], keys=remembered)
        unwrapped |= set(remembered.known.values())
    assert len(unwrapped) == 3


class Service:
    """A KMS: its key never leaves it, ids are its own."""

    def __init__(self):
        self.asked = []

    def wrap(self, data_key):
        self.asked.append("wrap")
        return "arn:key/7", b"sealed" + bytes(byte ^ 0x55 for byte in data_key)

    def unwrap(self, key_id, wrapped):
        self.asked.append("unwrap")
        if key_id != "arn:key/7":
            raise WrongKey(f"no access to {key_id}")
        return bytes(byte ^ 0x55 for byte in wrapped[6:])


def test_a_service_is_asked_as_little_as_can_be():
    """Once for a new checkpoint; once by a reader that remembers; never by one that was handed the keys."""
    service = Service()
    chain = CodecChain.begin(["float", "aes"], keys=service)
    assert service.asked == ["wrap"]
    stored = coded(chain, b"abc" * 100)
    remembered = CachedKeys(lambda: service)
    for _ in range(3):
        assert decoded(CodecChain.opened(chain.recorded, keys=remembered), stored, 300) == b"abc" * 100
    assert service.asked == ["wrap", "unwrap"]
    handed = CachedKeys(known=remembered.known)
    assert decoded(CodecChain.opened(chain.recorded, keys=handed), stored, 300) == b"abc" * 100
    assert service.asked == ["wrap", "unwrap"]
    assert not any(secret in repr(handed) for secret in remembered.known.values())
    with pytest.raises(KeyMissing):
        CodecChain.begin(["aes"], keys=handed)
    with pytest.raises(KeyMissing):
        CodecChain.opened(CodecChain.begin(["aes"], keys=KEYS).recorded, keys=handed)


class Short(Service):
    def unwrap(self, key_id, wrapped):
        return super().unwrap(key_id, wrapped)[:16]


def test_a_service_that_gives_no_data_key():
    recorded = CodecChain.begin(["aes"], keys=Service()).recorded
    with pytest.raises(WrongKey, match="16 bytes"):
        CodecChain.opened(recorded, keys=Short())


def test_keys_are_rotated_without_touching_data():
    """Wrapped anew, a checkpoint is read with the new key alone; nothing of its record changed but the wrapped key."""
    data = numbers("bf16", 5000)
    chain = CodecChain.begin(["float", "aes"], keys=KeyRing([OLD]))
    stored = coded(chain, data)
    before = copy.deepcopy(chain.recorded)
    recorded = rewrapped(chain.recorded, KeyRing([NEW, OLD]))
    assert chain.recorded == before
    assert without_keys(recorded) == without_keys(chain.recorded)
    turned = CodecChain.opened(recorded, keys=KeyRing([NEW]))
    assert decoded(turned, stored, len(data)) == data
    assert turned.mac(b"record") == chain.mac(b"record")
    with pytest.raises(WrongKey):
        CodecChain.opened(recorded, keys=KeyRing([OLD]))
    with pytest.raises(WrongKey):
        rewrapped(before, OTHER_KEYS)
    plain = CodecChain.begin(["zstd"]).recorded
    assert rewrapped(plain, KEYS) == plain


def test_key_rings_travel_to_processes_of_the_job():
    ring = pickle.loads(pickle.dumps(KeyRing([OLD, NEW])))
    assert ring.ids == KeyRing([OLD, NEW]).ids
    assert OLD.hex() not in repr(ring)
    assert ring.ids[0] in repr(ring)
