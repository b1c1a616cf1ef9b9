"""Keys, stores and codecs that tests of coded checkpoints share."""

import itertools
import threading

import torch

import shardkeep as sk
from shardkeep.codecs.base import CodecConfig
from shardkeep.codecs.keys import KeyRing
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.wrapper import WriterWrapper

KEYS = KeyRing([bytes(range(32))])
OTHER_KEYS = KeyRing([bytes(range(1, 33))])
OPTIONS = sk.Options(keys=KEYS)
MIB = 1 << 20


class InOrderStore(MemoryStore):
    """A store that says it wants bytes in order, and insists on it, but for what threads may have under way."""

    sequential = True

    def __init__(self, slack=0):
        super().__init__()
        self._slack = slack
        self.writes = []

    def create(self, name, nbytes):
        return _InOrderWriter(super().create(name, nbytes), name, self._slack, self.writes)


class _InOrderWriter(WriterWrapper):
    def __init__(self, inner, name, slack, writes):
        super().__init__(inner)
        self._name, self._slack, self._writes = name, slack, writes
        self._lock = threading.Lock()
        self._early = {}
        self._end = 0

    def write_at(self, offset, data):
        with self._lock:
            assert self._end <= offset <= self._end + self._slack, f"{self._name}: {offset} after {self._end}"
            self._writes.append((self._name, offset, data.nbytes))
            self._early[offset] = offset + data.nbytes
            while self._end in self._early:
                self._end = self._early.pop(self._end)
        super().write_at(offset, data)

    def finish(self, nbytes=None):
        assert not self._early, f"{self._name} has holes"
        super().finish(nbytes)


class Counting(CodecConfig, frozen=True):
    """A codec of a user's own, which flips bits and counts the frames it is given."""

    name = "test-counting"
    decoded = itertools.count()

    @classmethod
    def open(cls, recorded, keys):
        return _Flips()

    @classmethod
    def taken(cls):
        """How many frames were decoded since this was last asked."""
        return next(cls.decoded), setattr(cls, "decoded", itertools.count())


class _Flips:
    def bound(self, nbytes):
        return nbytes

    def encode(self, data, place):
        return bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8).bitwise_not().numpy()) if data.nbytes else b""

    def decode(self, data, place, most_nbytes):
        next(Counting.decoded)
        return self.encode(data, place)


def blobs_of(store):
    return {info.name: store.get(info.name, limit=1 << 30) for info in store.list()}


def race(open_place, **how):
    """Have two saves overwrite one place or make it, both past the last look at it; return who won, and the other's error."""
    barrier, outcomes = threading.Barrier(2), []

    def save(number):
        store = open_place()
        put = store.put

        def meeting(name, data, **kind):
            if name.startswith("claim-"):
                barrier.wait(30)
            put(name, data, **kind)

        store.put = meeting
        try:
            outcomes.append(sk.save({"w": torch.full((3,), float(number))}, store, step=number, **how))
        except sk.CheckpointExists as error:
            outcomes.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    [winner] = [each for each in outcomes if isinstance(each, sk.SaveReport)]
    [loser] = [each for each in outcomes if isinstance(each, sk.CheckpointExists)]
    return winner, loser
