"""Messages through each of torch's stores."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from shardkeep.dist import kv as mailbox_module
from shardkeep.dist.kv import PIECE_BYTES, KVMailbox, StoreUnreachable, with_mailbox


@pytest.fixture(params=["tcp", "file", "hash"])
def bare_store(request, tmp_path):
    if request.param == "tcp":
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    return FileStore(str(tmp_path / "store"), 1) if request.param == "file" else HashStore()


@pytest.fixture
def store(bare_store):
    return PrefixStore("a", PrefixStore("b", bare_store))


@pytest.fixture
def mailbox(store):
    return KVMailbox(store, 2, threading.Event())


@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5])
def test_a_message_arrives_and_leaves_nothing_behind(store, mailbox, nbytes):
    body = bytes(range(256)) * (nbytes // 256 + 1)
    before = store.num_keys()
    mailbox.put("letter", body[:nbytes])
    mailbox.put("postcard", b"\x00\xff")
    assert mailbox.read(["letter", "postcard"]) == [body[:nbytes], b"\x00\xff"]
    mailbox.drop("letter", nbytes)
    mailbox.drop("postcard")
    assert not mailbox.there("letter")
    assert store.num_keys() == before


def test_more_messages_than_one_request_reads(mailbox):
    names = [f"n{number}" for number in range(3 * mailbox_module.BATCH + 1)]
    for name in names:
        mailbox.put(name, name.encode())
    assert mailbox.read(names) == [name.encode() for name in names]


def test_a_log_has_what_was_appended_in_its_order_until_it_is_dropped(store, mailbox):
    bodies = [b"", b"?", b"\x00\xff", b"x" * 5000]
    before = store.num_keys()
    assert mailbox.entries(["log"]) == []
    for body in bodies:
        mailbox.append("log", body)
    assert mailbox.entries(["log"]) == bodies
    mailbox.drop_log("log")
    assert mailbox.entries(["log"]) == []
    assert store.num_keys() == before


@pytest.mark.parametrize("body", [b"", b"?", b"x" * (2 * PIECE_BYTES + 1)], ids=["empty", "short", "long"])
def test_a_look_at_a_message_returns_at_once(mailbox, body):
    assert mailbox.peek("letter") is None
    mailbox.put("letter", body)
    assert mailbox.peek("letter") == body


def test_waiting_ends_with_its_time_in_silence(mailbox, capfd):
    """torch's own `wait` writes two lines to stderr each time it ends without the key."""
    mailbox.put("first", b"")
    began = time.monotonic()
    assert mailbox.poll(lambda: mailbox.peek("second"), 0.3) is None
    assert time.monotonic() - began >= 0.3
    assert capfd.readouterr().err == ""


def test_a_visit_that_hangs_is_left_behind_and_ends_at_its_next_look(store, monkeypatch):
    monkeypatch.setattr(mailbox_module, "GRACE_S", 0.1)
    visitors = []
    release = threading.Event()

    def errand(mailbox):
        visitors.append(threading.current_thread())
        release.wait()
        return mailbox.poll(lambda: mailbox.peek("never"), 60)

    with pytest.raises(StoreUnreachable, match=r"did not answer for 0\.3 s"):
        with_mailbox(store, 2, errand, within_s=0.2)
    release.set()
    visitors[0].join(50)
    assert not visitors[0].is_alive()


def test_a_mistake_in_an_errand_is_not_taken_for_lost_mail(store):
    with pytest.raises(ZeroDivisionError):
        with_mailbox(store, 2, lambda _: 1 / 0, within_s=1)
