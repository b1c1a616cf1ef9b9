"""State dicts sent from rank to rank: every kind of value, into place or anew."""

import copy
import pickle
from collections import OrderedDict
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint._pg_transport as theirs
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp._impl.transport import PeerRefused
from shardkeep.dcp._pg_transport import PGTransport, _cast_tensor, _prepare_tensor
from shardkeep.dcp.staging import _ReplicationStager
from shardkeep.errors import CheckpointError, RanksDisagree, RanksSilent, UnsupportedLeaf
from tests.toolkit.samples import CPU, grid, in_chunks, mesh_of, numbered, seen, spread_out

SOON = timedelta(seconds=20)


class Pair(NamedTuple):
    left: object
    right: object


def plain_state():
    wide = numbered(40, 6)
    return {
        "matrix": numbered(3, 5),
        "transposed": numbered(4, 6).t(),
        "column": wide[:, 2],
        "expanded": torch.ones(1).expand(3, 2),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "half": numbered(7, dtype=torch.bfloat16),
        "eighth": numbered(9).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "no elements": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(numbered(2)),
        "nested": {"list": [numbered(2), {"x": 1}, ()], "pair": (numbered(1), "a"), 3: None},
        "ordered": OrderedDict(a=1.5, b=b"bytes"),
        "numbers": [1, 2, 3],
        "object": Pair(numbered(2), {1, 2}),
    }


def spread_state():
    line, square = mesh_of(dist.get_world_size()), grid()
    return {
        "rows": spread_out(numbered(8, 3), line, Cut(0)),
        "uneven": spread_out(numbered(5, 3), line, Cut(1)),
        "both": spread_out(numbered(4, 6, dtype=torch.float64), square, Cut(0), Replicate()),
        "chunks": in_chunks(numbered(8, 2)),
    }


def hand_over(make, target=None, kind=PGTransport):
    """Rank 0 sends to all others; each returns what it got, and whether it is the target's own memory."""
    into = None if target is None else target()
    transport = kind(dist.group.WORLD, SOON, CPU, None if into is None else lambda: into)
    state = make()  # on all ranks: to make a mesh, they must meet
    if dist.get_rank() == 0:
        transport.send_checkpoint(list(range(1, dist.get_world_size())), state)
        return None
    got = transport.recv_checkpoint(0)
    same = None if into is None else got["matrix"].data_ptr() == into["matrix"].data_ptr()
    return seen(got), same


def simple_state():
    return {"a": numbered(3, 4), "b": {"c": numbered(2, dtype=torch.int64), "n": 5}}


def test_a_state_arrives_as_it_was_sent(rank_pool):
    """Every kind of value arrives bit for bit on two receivers, as with torch's transport where that can send it."""
    _, first, second = rank_pool.run(3, hand_over, plain_state)
    assert first == second == (seen(plain_state()), None)
    assert list(first[0]) == list(plain_state())
    _, ours = rank_pool.run(2, hand_over, simple_state)
    assert ours == rank_pool.run(2, hand_over, simple_state, None, theirs.PGTransport)[1]


def hand_over_spread():
    transport, state = PGTransport(dist.group.WORLD, SOON, CPU), spread_state()
    if dist.get_rank() == 0:
        transport.send_checkpoint([1], state)
        return seen(state), None
    got = transport.recv_checkpoint(0)
    assert isinstance(got["rows"], DTensor)
    owners = [shard.metadata.placement.rank() for shard in got["chunks"].local_shards()]
    return seen(got), (list(got["rows"].device_mesh.get_coordinate()), owners)


def test_spread_tensors_arrive_as_the_senders_part(rank_pool):
    """DTensors and ShardedTensors come with the sender's part; the receiver's mesh says whose part it is."""
    (sent, _), (got, places) = rank_pool.run(2, hand_over_spread)
    assert got == sent
    assert places == ([0], [1])


def zeros_like_plain():
    return {
        "matrix": torch.zeros(3, 5),
        "transposed": torch.zeros(6, 4),  # lies in another order
        "column": torch.zeros(40, 6)[:, 0],
        "scalar": torch.tensor(0.0),
    }


def test_what_arrives_is_written_into_place(rank_pool):
    _, (got, same) = rank_pool.run(2, hand_over, plain_state, zeros_like_plain)
    assert got == seen(plain_state())
    assert same is True


def misfit():
    target = {"matrix": torch.zeros(3, 5), "column": torch.zeros(41)}
    transport = PGTransport(dist.group.WORLD, timedelta(seconds=3), CPU, lambda: target)
    if dist.get_rank() == 0:
        with pytest.raises(RanksSilent):
            transport.send_checkpoint([1], {"matrix": numbered(3, 5), "column": numbered(40)})
        return None
    with pytest.raises(AssertionError, match=r"\['column'\] arrives as"):
        transport.recv_checkpoint(0)
    return target["matrix"].sum().item()


def test_a_tensor_that_does_not_fit_is_refused_before_any_has_changed(rank_pool):
    assert rank_pool.run(2, misfit)[1] == 0


class Thing:
    """Cannot be pickled."""

    def __reduce__(self):
        raise TypeError("no copies of me")


def refused():
    transport = PGTransport(dist.group.WORLD, SOON, CPU)
    values = (Thing(), torch.ones(2, device="meta"), torch.ones(2).to_sparse())
    for value in values:
        if dist.get_rank() == 0:
            with pytest.raises(UnsupportedLeaf, match=r"\['model'\]\['thing'\]"):
                transport.send_checkpoint([1], {"model": {"thing": value}})
        else:
            with pytest.raises(PeerRefused, match=r"rank 0 cannot send its state: \['model'\]\['thing'\]"):
                transport.recv_checkpoint(0)
    if dist.get_rank() == 0:
        transport.send_checkpoint([1], {"fine": 1})
        return None
    return transport.recv_checkpoint(0)


def test_what_cannot_be_sent_is_refused_with_its_key_on_both_sides(rank_pool):
    """Nothing of the state is sent, and the transport can be used again at once."""
    assert rank_pool.run(2, refused)[1] == {"fine": 1}


def test_only_the_own_bytes_of_a_view_are_sent():
    """A row, a column and an expanded tensor take what they show; torch sends the storage they lie in."""
    whole = numbered(1000, 1000)
    for view in (whole[3], whole[:, 3]):
        row, meta = _prepare_tensor(view)
        assert row.nbytes == meta.nbytes == 4000
        assert theirs._prepare_tensor(view)[0].nbytes == 4_000_000
    assert _cast_tensor(whole[3], torch.uint8).nbytes == 4_000_000


def exchange(folder, size_of_group):
    group = dist.new_group(list(range(size_of_group)))
    if dist.get_rank() >= size_of_group:
        return None
    stager = _ReplicationStager(group, SOON, storage_dir=folder)
    mine = {"w": torch.full((3,), float(dist.get_rank())), "step": dist.get_rank()}
    received = stager.stage(mine)
    partner = (dist.get_rank() + size_of_group // 2) % size_of_group
    kept = None
    if size_of_group > 1:
        kept = torch.load(stager._get_persisted_path(dist.get_rank(), partner))["step"]
    assert received["w"].data_ptr() != mine["w"].data_ptr()
    return received["step"], received["w"].tolist(), kept


def test_ranks_hold_the_state_of_their_partner(rank_pool, tmp_path):
    """Half the group away, in memory and in a file; a rank alone gets a copy of its own."""
    found = rank_pool.run(4, exchange, str(tmp_path), 4)
    assert found == [(p, [float(p)] * 3, p) for p in (2, 3, 0, 1)]
    assert rank_pool.run(1, exchange, str(tmp_path), 1) == [(0, [0.0] * 3, None)]


def exchange_badly(folder, bad):
    stager = _ReplicationStager(dist.group.WORLD, SOON, storage_dir=folder)
    state = {"w": numbered(3), "thing": Thing() if dist.get_rank() == bad else 1}
    try:
        stager.stage(state)
    except CheckpointError as error:
        failed = type(error).__name__, "'thing'" in str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    return failed, stager.stage({"w": numbered(3)})["w"].tolist(), total.item()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_state_that_cannot_be_exchanged_fails_on_both_partners(rank_pool, tmp_path, bad):
    """The partner is told and does not wait; the group and the stager go on to work."""
    found = rank_pool.run(2, exchange_badly, str(tmp_path), bad)
    names = ["PeerRefused", "PeerRefused"]
    names[bad] = "UnsupportedLeaf"
    assert found == [((name, True), [0.0, 1.0, 2.0], 2.0) for name in names]


def into_the_midst():
    """Receive into a DTensor whose local part lies inside a longer row, as those of flat parameters do."""
    mesh = mesh_of(dist.get_world_size())
    flat = torch.zeros(24)
    target = DTensor.from_local(torch.zeros(4, 2), mesh, [Cut(0)])
    target._local_tensor = flat[8:16].view(4, 2)
    transport = PGTransport(dist.group.WORLD, SOON, CPU, lambda: {"d": target})
    if dist.get_rank() == 0:
        transport.send_checkpoint([1], {"d": DTensor.from_local(numbered(4, 2), mesh, [Cut(0)])})
        return None
    found = transport.recv_checkpoint(0)["d"]
    copied = copy.deepcopy(found)
    return (
        found.storage_offset(),
        flat[8:16].tolist(),
        copied._local_tensor.flatten().tolist(),
        len(pickle.dumps(found)) > 0,
    )


def test_a_dtensor_received_into_the_midst_of_a_row_is_whole(rank_pool):
    """It lies where it was to be received, and can be copied and pickled as any other."""
    row = numbered(8).tolist()
    assert rank_pool.run(2, into_the_midst)[1] == (0, row, row, True)


def unpaired(folder):
    with pytest.raises(RanksDisagree, match="3 ranks cannot be paired"):
        _ReplicationStager(dist.group.WORLD, SOON, storage_dir=folder).stage({})


def test_an_odd_number_of_ranks_has_no_pairs(rank_pool, tmp_path):
    rank_pool.run(3, unpaired, str(tmp_path))
