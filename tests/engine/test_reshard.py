"""
Any layout to any layout: random tensors cut one way over some ranks, loaded cut another way over others.

Ranks are threads here, so that hundreds of worlds are tried; `test_real_ranks` does it with processes and DTensors.
"""

import math
import tempfile

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkeep as sk
from shardkeep.format.boxes import slices
from shardkeep.state.placement import Cut, local_layout
from shardkeep.testing.thread_ranks import run_thread_ranks
from tests.engine.samples import all_dtypes, bits, random_tensor, raw_view

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
mesh_shapes = st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (2, 3), (8,), (2, 2, 2)])


@st.composite
def layouts(draw, shape):
    mesh = draw(mesh_shapes)
    dims = st.integers(0, len(shape) - 1) if shape else st.nothing()
    cutting = [mesh_dim for mesh_dim in range(len(mesh)) if shape and draw(st.booleans())]
    cuts = [Cut(mesh_dim, draw(dims), draw(st.sampled_from([1, 1, 2, 3]))) for mesh_dim in cutting]
    return mesh, cuts, draw(st.integers(0, 1))


@st.composite
def cases(draw):
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        dtype = draw(st.sampled_from(all_dtypes()))
        tensors.append((shape, dtype, draw(layouts(shape)), draw(layouts(shape))))
    return tensors


def coordinate_of(rank, mesh):
    if rank >= math.prod(mesh):
        return None
    coordinate = []
    for n in reversed(mesh):
        rank, at = divmod(rank, n)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def local_part(full, layout, rank, *, blank=False):
    """This rank's part of a tensor as a ShardedBox: pieces are views of one local tensor, as a DTensor's are."""
    mesh, cuts, _ = layout
    coordinate = coordinate_of(rank, mesh)
    shape = tuple(full.shape)
    if coordinate is None:
        return sk.ShardedBox.of([], shape=shape, dtype=full.dtype)
    local = torch.empty(local_layout(shape, mesh, coordinate, cuts)[0], dtype=full.dtype)
    pieces = []
    for there, here in local_layout(shape, mesh, coordinate, cuts)[1]:
        if not blank:
            raw_view(local)[slices(here)] = raw_view(full)[slices(there)]
        pieces.append((local[slices(here)], there.offsets))
    return sk.ShardedBox.of(pieces, shape=shape, dtype=full.dtype)


def world_size(layout):
    mesh, _, outside = layout
    return math.prod(mesh) + outside


def reshard(case, where, *, codecs=None, options=None):
    """Save on some ranks, load on others, and compare bit by bit what each of them and `open` gets; return the record."""
    fulls = [random_tensor(shape, dtype, seed=i) for i, (shape, dtype, _, _) in enumerate(case)]

    def save(world):
        state = {f"t{i}": local_part(full, case[i][2], world.rank) for i, full in enumerate(fulls)}
        return sk.save(state, where, group=world, codecs=None if world.rank else codecs, options=options)

    def load(world):
        state = {f"t{i}": local_part(full, case[i][3], world.rank, blank=True) for i, full in enumerate(fulls)}
        sk.load(state, where, group=world, options=options)
        return state

    reports = run_thread_ranks(max(world_size(before) for _, _, before, _ in case), save)
    states = run_thread_ranks(max(world_size(after) for _, _, _, after in case), load)
    ck = sk.open(where, options=options)
    tree = ck.to_dict()
    ck.verify()
    assert reports[0].bytes_total == sum(full.nbytes for full in fulls)
    for i, full in enumerate(fulls):
        assert bits(tree[f"t{i}"]) == bits(full)
        for state in states:
            for piece, offsets in state[f"t{i}"].pieces:
                expected = full[tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))]
                assert bits(piece) == bits(expected)
    return ck.record


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases())
def test_any_layout_loads_into_any_other(case):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        reshard(case, where)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_slice_reads_what_torch_would_give(data):
    shape = data.draw(st.lists(st.integers(1, 12), max_size=3).map(tuple))
    full = random_tensor(shape, torch.float32)
    layout = data.draw(layouts(shape))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        run_thread_ranks(
            world_size(layout), lambda world: sk.save({"t": local_part(full, layout, world.rank)}, where, group=world)
        )
        stored = sk.open(where)["t"]
        for _ in range(10):
            index = tuple(data.draw(_index_of(n)) for n in shape[: data.draw(st.integers(0, len(shape)))])
            if data.draw(st.booleans()):
                index = (*index[:1], ..., *index[1:]) if len(index) == len(shape) else (*index, ...)
            assert bits(stored[index]) == bits(full[index])


def _index_of(n):
    part = st.one_of(st.none(), st.integers(-n - 2, n + 2))
    step = st.one_of(st.none(), st.integers(1, 4))
    return st.one_of(st.integers(-n, n - 1), st.builds(slice, part, part, step))


def test_large_replicas_are_split_and_nothing_is_written_twice(tmp_path):
    """Replicated tensors are written once in all, every rank a fair part, whatever the ranks hold besides."""
    big = torch.randn(16, 1024, 1024)
    small = {f"s{i}": torch.randn(1000 + i) for i in range(40)}

    def save(world):
        mine = sk.ShardedBox(torch.randn(1 << 20), offsets=(world.rank << 20,), shape=(4 << 20,))
        return sk.save({"big": big, **small, "mine": mine}, tmp_path / "ck", group=world)

    reports = run_thread_ranks(4, save)
    total = big.nbytes + sum(t.nbytes for t in small.values()) + (16 << 20)
    files = sum(path.stat().st_size for path in (tmp_path / "ck").glob("*.safetensors"))
    assert reports[0].bytes_total == total
    assert files - total < 4 * 65536  # headers
    share = [report.bytes_written for report in reports]
    assert max(share) - min(share) < 5 << 20
    assert torch.equal(sk.open(tmp_path / "ck")["big"][...], big)


def test_one_row_costs_about_one_row(tmp_path):
    full = torch.randn(4096, 4096)
    sk.save({"w": full}, tmp_path / "ck")
    row = torch.zeros(1, 4096)
    report = sk.load({"w": sk.ShardedBox(row, offsets=(1234, 0), shape=(4096, 4096))}, tmp_path / "ck")
    assert torch.equal(row[0], full[1234])
    assert report.bytes_read < 200_000 < full.nbytes


def test_columns_of_rows_are_read_within_the_budget(tmp_path):
    """A load that cuts the other way goes through a bounded buffer, with the smallest budget too."""
    full = torch.randn(1000, 3000)
    rows = [full[i * 250 : (i + 1) * 250] for i in range(4)]
    run_thread_ranks(
        4,
        lambda w: sk.save(
            {"w": sk.ShardedBox(rows[w.rank], offsets=(250 * w.rank, 0), shape=(1000, 3000))}, tmp_path / "ck", group=w
        ),
    )
    options = sk.Options(io_threads=2, host_budget_bytes=1)

    def load(world):
        mine = torch.zeros(1000, 1500)
        box = sk.ShardedBox(mine, offsets=(0, 1500 * world.rank), shape=(1000, 3000))
        sk.load({"w": box}, tmp_path / "ck", group=world, options=options)
        return mine

    columns = run_thread_ranks(2, load)

    assert torch.equal(torch.cat(columns, dim=1), full)
