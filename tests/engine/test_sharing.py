"""Loads in which ranks read for each other, over real ranks: the same bits, fewer reads, and no rank waits for a lost one."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dist.world import World
from shardkeep.engine import peers
from shardkeep.errors import ChecksumMismatch
from shardkeep.storage.local import LocalStore
from tests.dcp.sides import quietly
from tests.engine.samples import bits, random_tensor

MESHES = {2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1)]}
SHAPES = [(), (5,), (700, 60), (30, 5, 400), (0, 3), (1, 9), (1, 1, 3000), (160, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


# On a machine that does much else, messages between ranks may take longer than reads from a cache: that is not looked at here.
sharing_anyway = mock.patch.object(peers, "_MEASURED", 1 << 30)


def shared(**kwargs):
    """Options of a load with little memory, so that ranges are small and do not all fit."""
    return sk.Options(share_reads=True, host_budget_bytes=2 << 20, **kwargs)


def full_tensors(seed):
    rng = random.Random(seed)
    return {
        f"t{n}": random_tensor(shape, rng.choice(DTYPES[:5] if len(shape) > 1 else DTYPES), seed + n)
        for n, shape in enumerate(SHAPES)
    }


def laid_out(full, rng):
    """A tensor as it might stand in a state: in any layout over all ranks, or whole, in memory of any order."""
    kind = rng.randrange(4)
    if kind == 0 or full.dim() == 0:
        return full.clone()
    if kind == 1:
        return full.transpose(0, -1).contiguous().transpose(0, -1)
    mesh = rng.choice(MESHES[dist.get_world_size()])
    placements = [rng.choice([Replicate(), Replicate(), *(Shard(d) for d in range(full.dim()))]) for _ in mesh]
    return distribute_tensor(full, init_device_mesh("cpu", mesh), placements, src_data_rank=None)


def blank_of(seed):
    rng = random.Random(seed)
    state = {key: laid_out(torch.zeros_like(full), rng) for key, full in full_tensors(seed // 10).items()}
    return {**state, "step": 0}


def local(state):
    return bits({key: each.to_local() if hasattr(each, "to_local") else each for key, each in state.items()})


@sharing_anyway
def load_layouts(folder, seeds):
    received = 0
    for seed in seeds:
        full = full_tensors(seed // 10)
        where = f"{folder}/{seed}"
        rng = random.Random(seed)
        saved = {key: laid_out(each, rng) for key, each in full.items()}
        own = {"rng": torch.full((3,), float(dist.get_rank()))}
        sk.save({**saved, "own": sk.PerRank(own), "step": seed}, where)
        plain, together = blank_of(seed + 1), blank_of(seed + 1)
        sk.load(plain, where, strict=False)
        # The same on all ranks, or on some of them: every rank has one partner, or reads for itself.
        together["own"] = sk.PerRank({"rng": torch.zeros(3)}) if seed % 20 else 0
        received += sk.load(together, where, strict=False, options=shared()).bytes_received
        read = together.pop("own")
        assert not seed % 20 or read.value["rng"].tolist() == own["rng"].tolist()
        assert local(together) == local(plain)
        assert together["step"] == seed
        everywhere = {key: torch.zeros_like(each) for key, each in full.items()}
        received += sk.load(everywhere, where, strict=False, options=shared()).bytes_received
        assert bits(everywhere) == bits(full)
    return received


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_layout_loads_as_without_sharing(rank_pool, tmp_path, ranks):
    """Random meshes, placements, strides and dtypes: ranks get from each other exactly what they would read."""
    received = rank_pool.run(ranks, load_layouts, str(tmp_path), range(ranks * 100, ranks * 100 + 30, 10))
    assert min(received) > 0


@sharing_anyway
def load_replicas(where, options, group_of=None):
    group = dist.new_group(group_of) if group_of else None
    if group_of and dist.get_rank() not in group_of:
        return None
    state = {"w": torch.zeros(6 << 20), **{f"t{n}": torch.zeros(1000) for n in range(200)}}
    report = sk.load(state, where, options=options, group=group)
    assert all(each.eq(n + 1).all() for n, each in enumerate(state.values()))
    return report.bytes_read, report.bytes_received


def replicas(where):
    state = {"w": torch.ones(6 << 20), **{f"t{n}": torch.full((1000,), n + 2.0) for n in range(200)}}
    sk.save(state, where)
    return sum(each.nbytes for each in state.values())


def test_replicas_are_read_once(rank_pool, tmp_path):
    """Four replicas fetch each byte once in all, and get the rest from each other; on a local disk that is not the default."""
    nbytes = replicas(tmp_path / "ck")
    read = rank_pool.run(4, load_replicas, tmp_path / "ck", sk.Options(share_reads=True, host_budget_bytes=64 << 20))
    assert all(own + got > nbytes for own, got in read)
    assert sum(own for own, _ in read) < 1.1 * nbytes
    alone = rank_pool.run(2, load_replicas, tmp_path / "ck", sk.Options())
    assert all(each >= nbytes and got == 0 for each, got in alone)


@sharing_anyway
def count_fetches(where, environment):
    os.environ.update(environment)
    fetched = []
    fetch = peers.Peers._timed

    def counted(self, alone, into):
        fetched.append(len(into))
        fetch(self, alone, into)

    with mock.patch.object(peers.Peers, "_timed", counted):
        state = {"w": torch.zeros(6 << 20), "b": torch.zeros(1000)}
        report = sk.load(state, where)
    assert state["w"].eq(1).all()
    return sum(fetched), report.bytes_received


def test_a_bucket_is_read_once(rank_pool, s3_server, s3_root):
    sk.save({"w": torch.ones(6 << 20), "b": torch.ones(1000)}, s3_root)
    fetched = rank_pool.run(4, count_fetches, s3_root, s3_server.environment)
    nbytes = (6 << 20) * 4 + 4000
    assert nbytes <= sum(own for own, _ in fetched) <= 1.1 * nbytes
    assert sum(received for _, received in fetched) >= 2.9 * nbytes


@sharing_anyway
def load_by_dcp(where):
    os.environ["SHARDKEEP_SHARE_READS"] = "1"
    state = {"w": torch.zeros(3 << 20), "b": torch.zeros(1000)}
    with mock.patch.object(peers.Peers, "close", autospec=True, side_effect=peers.Peers.close) as closed:
        quietly(dcp.load, state, checkpoint_id=where)
    del os.environ["SHARDKEEP_SHARE_READS"]
    assert state["w"].eq(1).all()
    [call] = closed.call_args_list
    return call.args[0].received_nbytes


def test_the_drop_in_shares_too(rank_pool, tmp_path):
    quietly(dcp.save, {"w": torch.ones(3 << 20), "b": torch.ones(1000)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert min(rank_pool.run(3, load_by_dcp, tmp_path / "ck")) > 0


def test_a_subgroup_shares_by_its_own_ranks(rank_pool, tmp_path):
    nbytes = replicas(tmp_path / "ck")
    heard = rank_pool.run(4, load_replicas, tmp_path / "ck", shared(), group_of=[1, 3])
    assert heard[0] is None
    assert heard[2] is None
    assert sum(heard[rank][1] for rank in (1, 3)) > 0.5 * nbytes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(300, 400)
        self.down = nn.Linear(400, 300)
        self.down.weight = nn.Parameter(self.up.weight.detach().t().contiguous())


@sharing_anyway
def load_objects(where):
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        wanted = nn.Linear(300, 400)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    tied = net.up.weight
    state = {"net": net, "opt": optimizer, "lazy": wanted.weight.detach(), "tied": tied}
    saw = tied._version
    report = sk.load(state, where, options=shared())
    assert tied._version > saw
    return report.bytes_received > 0, bits({**net.state_dict(), "lazy": state["lazy"]}), str(optimizer.state_dict())


def test_modules_optimizers_and_meta_tensors(rank_pool, tmp_path):
    """What stands in a state for objects, and tensors that had no memory, are there before objects are given theirs."""
    torch.manual_seed(9)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    sum(p.square().sum() for p in net.parameters()).backward()
    optimizer.step()
    sk.save({"net": net, "opt": optimizer, "lazy": torch.ones(400, 300), "tied": net.up.weight}, tmp_path / "ck")
    expected = (True, bits({**net.state_dict(), "lazy": torch.ones(400, 300)}), str(optimizer.state_dict()))
    assert rank_pool.run(3, load_objects, tmp_path / "ck") == [expected] * 3


@sharing_anyway
def load_torchs(where):
    state = {"w": torch.zeros(3000, 100), "b": torch.zeros(7), "step": 0}
    report = sk.load(state, where, options=shared())
    return bits(state), report.bytes_received


def test_checkpoints_of_torchs_layout(rank_pool, tmp_path):
    state = {"w": torch.randn(3000, 100), "b": torch.randn(7), "step": 3}
    quietly(theirs.save, state, checkpoint_id=tmp_path / "ck", no_dist=True)
    heard = rank_pool.run(3, load_torchs, tmp_path / "ck")
    assert [each for each, _ in heard] == [bits(state)] * 3
    assert sum(received for _, received in heard) > 0.9 * 2 * (3000 * 100 + 7) * 4


# Failures


def load_damaged(where):
    state = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20), "c": torch.zeros(1 << 20)}
    with pytest.raises(ChecksumMismatch) as told:
        sk.load(state, where, options=shared())
    return str(told.value)


def test_damage_is_found_on_every_rank(rank_pool, tmp_path):
    """A broken block that a peer sends is read again from the store; it is damaged there too, and every rank says so."""
    sk.save({key: torch.full((1 << 20,), n + 1.0) for n, key in enumerate("abc")}, tmp_path / "ck")
    [file] = (tmp_path / "ck").glob("*.safetensors")
    with open(file, "r+b") as data:
        data.seek(-3_000_000, os.SEEK_END)
        data.write(b"\x7f")
    heard = rank_pool.run(3, load_damaged, tmp_path / "ck")
    assert len(set(heard)) == 1
    assert "read twice, the same both times" in heard[0]
    assert "'c'" in heard[0]


@sharing_anyway
def change_on_the_way(where):
    receive = peers._receive_into

    def broken(connection, into):
        receive(connection, into)
        if len(into) > 1000:
            into[500] ^= 1

    state = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
    with mock.patch.object(peers, "_receive_into", broken):
        sk.load(state, where, options=shared())
    return [state[key].unique().tolist() for key in "ab"]


def test_what_a_network_changes_is_read_from_the_store(rank_pool, tmp_path):
    sk.save({"a": torch.full((1 << 20,), 1.0), "b": torch.full((1 << 20,), 2.0)}, tmp_path / "ck")
    assert rank_pool.run(2, change_on_the_way, tmp_path / "ck") == [[[1.0], [2.0]]] * 2


def load_over_a_slow_network(where):
    receive = peers._receive_into

    def slowly(connection, into):
        receive(connection, into)
        if len(into) > 1000:
            time.sleep(0.2)

    state = {"w": torch.zeros(6 << 20)}
    with mock.patch.object(peers, "_receive_into", slowly), mock.patch.object(peers, "_MEASURED", 2):
        report = sk.load(state, where, options=shared(io_threads=1))
    assert state["w"].eq(1).all()
    return report.bytes_received


def test_a_network_that_is_slower_than_the_store_is_noticed(rank_pool, tmp_path):
    """After a few ranges, ranks read for themselves."""
    sk.save({"w": torch.ones(6 << 20)}, tmp_path / "ck")
    assert all(
        0 < received < (6 << 20) * 4 / 4 for received in rank_pool.run(2, load_over_a_slow_network, tmp_path / "ck")
    )


def lose_a_rank(where, how):
    rank = dist.get_rank()
    state = {f"t{n}": torch.zeros(300_000) for n in range(9)}
    lend = peers._Shelf.lend

    def fail(self, *args):
        if threading.current_thread().name == "shardkeep-peer":  # another rank asks
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.5)
        return lend(self, *args)

    failing = mock.patch.object(peers._Shelf, "lend", fail) if rank == 2 else contextlib.nullcontext()
    limits = mock.patch.multiple(peers, _LEAST_ANSWER_S=0.3, _MOST_ANSWER_S=0.3, _MEASURED=1 << 30)
    with failing, limits, contextlib.suppress(sk.CheckpointError) if how == "dies" else contextlib.nullcontext():
        sk.load(state, where, options=shared(timeout_s=5 if how == "dies" else 60))
    return [each.unique().tolist() for each in state.values()]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_no_rank_waits_for_a_peer_that_is_lost(rank_pool, tmp_path, how):
    """A rank dies, or hangs, while others ask it for what it reads: they read that for themselves, and have all of it."""
    sk.save({f"t{n}": torch.full((300_000,), n + 1.0) for n in range(9)}, tmp_path / "ck")
    outcomes = rank_pool.outcomes(3, lose_a_rank, tmp_path / "ck", how)
    assert bool(outcomes[2].died) == (how == "dies")
    for outcome in outcomes[: 2 if how == "dies" else 3]:
        assert outcome.error is None, outcome.trace
        assert outcome.value == [[n + 1.0] for n in range(9)]


def test_a_peer_that_sends_a_little_at_a_time_is_lost(tmp_path):
    """A range has one deadline, however often some of it arrives; it is then read from the store."""
    data = bytes(range(200)) * 5
    store = LocalStore(tmp_path)
    store.put("blob", data)
    party = peers.Peers(store, World(0, 2), room_nbytes=1 << 20)

    def trickle():
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(peers._ANSWER.pack(True))
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as server, mock.patch.object(peers, "_LEAST_ANSWER_S", 0.2):
        other = peers.Offer(b"", "", "127.0.0.1", server.getsockname()[1], b"x" * 16)
        threading.Thread(target=trickle, daemon=True).start()
        party.join(msgspec.msgpack.encode(peers.Team([other, other], [0, 1], 0)))
        with contextlib.closing(party.store.open("blob")) as reader:
            for at in range(0, len(data), 200):
                into = bytearray(200)
                reader.read_into(at, memoryview(into))
                assert into == data[at : at + 200]
    assert party._lost == {1}
    assert party.received_nbytes == 0
    party.close()


@sharing_anyway
def load_with_options(where, on_ranks):
    state = {"w": torch.zeros(1 << 20)}
    report = sk.load(state, where, options=shared() if dist.get_rank() in on_ranks else sk.Options())
    assert state["w"].eq(1).all()
    return report.bytes_received > 0


@pytest.mark.parametrize(
    ("backend", "on_ranks"), [("gloo", [0, 2]), ("gloo", [1]), ("fake", [0, 1, 2]), ("cuda:gloo", [0, 1, 2])]
)
def test_ranks_that_were_asked_to_share_do(rank_pool, tmp_path, backend, on_ranks):
    """Sharing needs no backend of the process group. A rank that was not asked to, or is the only one, reads for itself."""
    sk.save({"w": torch.ones(1 << 20)}, tmp_path / "ck")
    heard = rank_pool.run(3, load_with_options, tmp_path / "ck", on_ranks, backend=backend)
    assert heard == [rank in on_ranks and len(on_ranks) > 1 for rank in range(3)]


def test_only_the_team_is_answered(tmp_path):
    store = LocalStore(tmp_path)
    store.put("blob", b"secret")
    party = peers.Peers(store, World(0, 2), room_nbytes=1 << 20)
    offer = msgspec.msgpack.decode(party.offer(b"the same"), type=peers.Offer)
    party.join(msgspec.msgpack.encode(peers.Team([offer, offer], [0, 1], 0)))
    ask = peers._REQUEST.pack(0, 6, 4) + b"blob"
    heard = []
    for token in (offer.token, b"x" * len(offer.token)):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", offer.port), timeout=20) as connection,
        ):
            connection.sendall(token + ask)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                heard.append(answer.read())
    party.close()
    assert heard[0] == peers._ANSWER.pack(True) + b"secret"
    assert heard[1:] in ([], [b""])


def test_a_shelf_is_bounded():
    """Ranges are fetched once, kept until all have them, and dropped, oldest first, when there is no room."""
    shelf = peers._Shelf(room_nbytes=300)
    fetched, most = [], [0]

    def fetch(name):
        def into(data):
            fetched.append(name)
            most[0] = max(most[0], shelf._nbytes)
            data[:] = name.encode() * len(data)

        return into

    def take(name):
        with shelf.lend(peers._Range(name, 0, 100), 2, fetch(name)) as data:
            assert bytes(data) == name.encode() * 100

    threads = [threading.Thread(target=take, args=("a",)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert fetched == ["a"]
    for name in "bcdebe":
        take(name)
    assert fetched == ["a", *"bcdeb"]
    assert most[0] <= 300


def test_a_shelf_that_peers_hold_is_not_waited_for(tmp_path):
    """While others are slow to take all that there is memory for, a rank reads its own ranges from the store."""
    store = LocalStore(tmp_path)
    store.put("blob", bytes(range(200)))
    party = peers.Peers(store, World(0, 2), room_nbytes=100)
    other = peers.Offer(b"", "", "127.0.0.1", 1, b"x" * 16)
    party.join(msgspec.msgpack.encode(peers.Team([other, other], [0, 1], 0)))
    into = bytearray(200)
    with (
        mock.patch.object(peers, "_LEAST_ANSWER_S", 0.05),
        party._shelf.lend(peers._Range("slow", 0, 100), 2, lambda _: None),
        contextlib.closing(party.store.open("blob")) as reader,
    ):
        for at in (0, 100):
            reader.read_into(at, memoryview(into)[at : at + 100])
    assert into == bytes(range(200))
    party.close()


# On an accelerator


@sharing_anyway
def load_on_device(where):
    state = {"w": torch.zeros(700, 900, device=DEVICE), "b": torch.zeros(9, device=DEVICE), "c": torch.zeros(40)}
    report = sk.load(state, where, options=shared())
    return report.bytes_received > 0, bits({key: each.cpu() for key, each in state.items()})


@pytest.mark.skipif(DEVICE is None, reason="needs an accelerator")
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_tensors_on_an_accelerator(rank_pool, tmp_path, backend):
    """What is on a device goes through host memory, over gloo; ranks on one device could not use nccl."""
    state = {"w": torch.randn(700, 900), "b": torch.randn(9), "c": torch.randn(40)}
    sk.save(state, tmp_path / "ck")
    heard = rank_pool.run(3, load_on_device, tmp_path / "ck", backend=backend)
    assert heard == [(True, bits(state))] * 3
