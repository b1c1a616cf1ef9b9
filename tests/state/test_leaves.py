"""Every tensor-like leaf as the same plain value: nothing copied, nothing guessed, the rest refused by name."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardkeep.errors import InvalidShards, UnsupportedLeaf
from shardkeep.state.leaves import PerRank, ShardedBox, TensorLeaf, describe_leaf, is_tensor, materialize
from tests.support.rank_pool import RankPool


class Tagged(torch.Tensor):
    """A subclass that adds nothing to the values (fastai, tv_tensors)."""


class Watched(torch.Tensor):
    """A subclass that meddles with functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class SpecialParameter(nn.Parameter):
    """A framework's own parameter class."""


class Packed(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def only(leaf: TensorLeaf) -> torch.Tensor:
    (piece,) = leaf.pieces
    assert piece.offsets == (0,) * len(leaf.shape)
    assert tuple(piece.tensor.shape) == leaf.shape
    return piece.tensor


def check_plain(tensor: torch.Tensor) -> None:
    assert type(tensor) is torch.Tensor
    assert tensor.layout is torch.strided
    assert not tensor.requires_grad
    assert tensor.grad_fn is None


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(3.0) + 1


PLAIN = {
    "contiguous": lambda: torch.arange(6.0).reshape(2, 3),
    "scalar": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.arange(6).reshape(2, 3).t(),
    "sliced": lambda: torch.arange(24).reshape(4, 6)[1:3, ::2],
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "channels last": lambda: torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "not a leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.arange(4.0)),
    "buffer": lambda: nn.Buffer(torch.arange(4.0)),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "subclass": lambda: torch.arange(4.0).as_subclass(Tagged),
    "parameter class": lambda: SpecialParameter(torch.arange(4.0)),
    "parameter of a subclass": lambda: nn.Parameter(torch.arange(4.0).as_subclass(Tagged)),
    "inference": _inference,
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_plain_tensors_are_viewed(make: Any) -> None:
    tensor = make()
    leaf = describe_leaf("k", tensor)
    view = only(leaf)
    check_plain(view)
    assert (leaf.dtype, leaf.shape) == (tensor.dtype, tuple(tensor.shape))
    assert (view.data_ptr(), view.stride()) == (tensor.data_ptr(), tensor.stride())
    assert torch.equal(view, tensor.detach())
    assert is_tensor(tensor)


def test_functions_of_a_subclass_are_not_called() -> None:
    raw = torch.arange(3.0)
    assert only(describe_leaf("k", raw.as_subclass(Watched))).data_ptr() == raw.data_ptr()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_elements_no_pieces(shape: tuple[int, ...], device: str) -> None:
    expected = TensorLeaf(torch.int16, shape, (), None)
    assert describe_leaf("k", torch.empty(shape, dtype=torch.int16, device=device)) == expected
    if device == "cpu":
        assert describe_leaf("k", np.empty(shape, np.int16)) == expected


@pytest.mark.parametrize(
    "lazy",
    [
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.tensor([1 + 2j])[0].conj(),
    ],
    ids=["conj", "neg", "scalar"],
)
def test_lazy_views_are_resolved(lazy: torch.Tensor) -> None:
    """Conjugate and negative bits are not stored as such: the values are."""
    assert lazy.is_conj() or lazy.is_neg()
    view = only(describe_leaf("k", lazy))
    assert not view.is_conj()
    assert not view.is_neg()
    assert torch.equal(view, lazy)
    assert describe_leaf("k", lazy).alias == describe_leaf("l", lazy).alias
    assert describe_leaf("k", lazy).alias != describe_leaf("k", torch._neg_view(lazy)).alias
    with pytest.raises(UnsupportedLeaf, match="'k'"):
        describe_leaf("k", lazy, writable=True)


ARRAYS = {
    "contiguous": np.arange(6.0).reshape(2, 3),
    "scalar": np.array(2.5),
    "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    "stepped": np.arange(12, dtype=np.uint16)[::3],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "unsigned long long": np.arange(3, dtype=np.ulonglong),
    "complex": np.ones(3, np.complex128),
}
COPIED = {
    "reversed": np.arange(6)[::-1],
    "unaligned": np.frombuffer(bytes(range(17)), np.uint8)[1:].view(np.float32),
    "field": np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i1"), ("b", "f4")])["b"],
    "reversed, read-only": np.frombuffer(bytes(8), np.int16)[::-1],
}


@pytest.mark.parametrize("array", [*ARRAYS.values(), *COPIED.values()], ids=[*ARRAYS, *COPIED])
def test_numpy_arrays(array: np.ndarray[Any, Any]) -> None:
    """A numpy array is described as a tensor over its memory, or over a copy where torch cannot view it."""
    assert is_tensor(array)
    view = only(describe_leaf("k", array))
    check_plain(view)
    assert str(view.dtype) == f"torch.{array.dtype.name}"
    assert np.array_equal(view.numpy(), array)
    assert (view.data_ptr() == array.ctypes.data) == any(array is known for known in ARRAYS.values())


def test_read_only_arrays_do_not_warn(tmp_path: Any) -> None:
    np.arange(6.0).tofile(tmp_path / "a")
    mapped = np.memmap(tmp_path / "a", mode="r", dtype=np.float64)
    locked = np.arange(6.0)
    locked.flags.writeable = False
    for array in (mapped, locked):
        view = only(describe_leaf("k", array))
        assert view.data_ptr() == array.ctypes.data
        assert view.tolist() == [0, 1, 2, 3, 4, 5]
        with pytest.raises(UnsupportedLeaf, match="'k' is a read-only"):
            describe_leaf("k", array, writable=True)
    # The pieces keep a read-only array's memory alive.
    assert only(describe_leaf("k", np.frombuffer(bytes(range(100)), np.uint8))).tolist() == list(range(100))


@pytest.mark.parametrize(
    "obj",
    [
        np.arange(3, dtype=">i4"),
        np.array(["a"]),
        np.array([object()]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.zeros(2, np.longdouble),
        np.ma.masked_array([1, 2], [True, False]),
        np.float32(3),
        3.5,
        [torch.ones(2)],
        PerRank(torch.ones(2)),
        None,
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_other_things_are_not_tensors(obj: Any) -> None:
    assert not is_tensor(obj)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str
)
def test_sparse_is_refused(layout: torch.layout) -> None:
    block = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    sparse = torch.eye(4).to_sparse(layout=layout, blocksize=block)
    with pytest.raises(UnsupportedLeaf, match=rf"'a\.b' has layout {layout}\n.*to_dense"):
        describe_leaf("a.b", sparse)


class PackedDetach(Packed):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PackedDetach(args[0].inner)


def _freed() -> torch.Tensor:
    view = torch.ones(6)[2:4]
    view.untyped_storage().resize_(0)
    return view


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def _functional() -> torch.Tensor:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(3))


@pytest.mark.filterwarnings("ignore")  # torch's own notices about each of these
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "int_repr"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "mkldnn"),
        (lambda: Packed(torch.ones(2)), r"test_leaves\.Packed.*(?s:.*)dequantize"),
        (lambda: nn.Parameter(PackedDetach(torch.ones(2))), "PackedDetach"),
        (lambda: nn.LazyLinear(3).weight, "lazy"),
        (lambda: torch._to_functional_tensor(torch.ones(2)), "functional"),
        (lambda: torch._efficientzerotensor(3), "no memory"),
        (_freed, "no memory"),
        (_fake, "FakeTensor"),
        (_functional, "FunctionalTensor"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: nn.Parameter(torch.empty(3, device="meta")), "meta device"),
    ],
)
def test_refusals_name_key_and_kind(make: Any, what: str) -> None:
    leaf = make()
    assert is_tensor(leaf)
    with pytest.raises(UnsupportedLeaf, match=what) as caught:
        describe_leaf("a.b", leaf)
    assert caught.value.message.startswith("'a.b' ")
    assert caught.value.hint
    assert caught.value.details["key"] == "a.b"


def test_meta_where_allowed() -> None:
    leaf = describe_leaf("k", torch.empty(2, 3, device="meta"), allow_meta=True, writable=True)
    assert only(leaf).is_meta
    assert leaf.alias is None


def test_alias_is_the_same_memory_seen_the_same_way() -> None:
    """Tied weights share an alias; another shape, stride, offset, dtype or memory does not."""
    base = torch.arange(12.0).reshape(3, 4)
    alias = describe_leaf("a", base).alias
    same = [base, nn.Parameter(base), base.view(3, 4), base.numpy(), base.as_subclass(Tagged), base[:]]
    same += [ShardedBox(base, offsets=(0, 0), shape=(3, 4))]
    for other in same:
        assert describe_leaf("b", other).alias == alias
        assert hash(describe_leaf("b", other).alias) == hash(alias)
    others = [base.clone(), base.view(4, 3), base.t(), base[1:], base.view(torch.int32), base.view(12)]
    others += [base.t().contiguous().t(), ShardedBox(base, offsets=(3, 0), shape=(6, 4))]
    assert all(describe_leaf("b", other).alias not in (alias, None) for other in others)
    square = torch.ones(3, 3)
    assert describe_leaf("a", square).alias != describe_leaf("a", square.t()).alias


def test_alias_of_several_pieces() -> None:
    a, b = torch.ones(2), torch.ones(2)

    def boxed(*pieces: tuple[torch.Tensor, tuple[int, ...]]) -> Any:
        return describe_leaf("k", ShardedBox.of(pieces, shape=(4,), dtype=torch.float32)).alias

    assert boxed((a, (0,)), (b, (2,))) == boxed((a, (0,)), (b, (2,)))
    assert boxed((a, (0,)), (b, (2,))) != boxed((b, (0,)), (a, (2,)))
    assert boxed((a, (0,))) != boxed((a, (0,)), (b, (2,)))
    assert boxed() is None


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(3).expand(2, 3), np.broadcast_to(np.ones(3), (2, 3)), np.arange(3)[::-1]],
    ids=["expanded", "broadcast", "reversed"],
)
def test_what_cannot_be_filled(leaf: Any) -> None:
    describe_leaf("k", leaf)
    with pytest.raises(UnsupportedLeaf, match="'k'"):
        describe_leaf("k", leaf, writable=True)


def test_writable_leaves_see_what_is_written() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3).t())
    box = ShardedBox(torch.zeros(2).as_subclass(Tagged), offsets=(1,), shape=(3,))
    array = np.zeros(3)
    one_wide = torch.zeros(1).expand(1, 1)
    for leaf, read in (
        (parameter, parameter.detach),
        (box, lambda: box.pieces[0][0]),
        (array, lambda: torch.from_numpy(array)),
        (one_wide, lambda: one_wide),
    ):
        for piece in describe_leaf("k", leaf, writable=True).pieces:
            piece.tensor.fill_(7)
        assert bool((read() == 7).all())
    assert parameter._version > 0


def test_sharded_boxes() -> None:
    first, second = torch.ones(2, 3), nn.Parameter(torch.zeros(1, 3))
    box = ShardedBox.of(
        [(first, (0, 0)), (torch.ones(0, 3), (2, 0)), (second, (4, 0))], shape=(6, 3), dtype=torch.float32
    )
    leaf = describe_leaf("k", box)
    assert (leaf.dtype, leaf.shape) == (torch.float32, (6, 3))
    assert [piece.offsets for piece in leaf.pieces] == [(0, 0), (4, 0)]
    assert [piece.tensor.data_ptr() for piece in leaf.pieces] == [first.data_ptr(), second.data_ptr()]
    for piece in leaf.pieces:
        check_plain(piece.tensor)
    assert describe_leaf("k", ShardedBox(torch.tensor(1.0), offsets=(), shape=())).pieces[0].offsets == ()


@pytest.mark.parametrize(
    ("tensor", "offsets", "what"),
    [
        (torch.ones(2, 3), (5, 0), "does not lie inside"),
        (torch.ones(2, 3), (-1, 0), "does not lie inside"),
        (torch.ones(2, 4), (0, 0), "does not lie inside"),
        (torch.ones(6), (0,), "does not lie inside"),
        (torch.ones(2, 3), (0,), "does not lie inside"),
        (torch.ones(2, 3, dtype=torch.float64), (0, 0), "float64"),
    ],
)
def test_wrong_boxes(tensor: torch.Tensor, offsets: tuple[int, ...], what: str) -> None:
    box = ShardedBox.of([(tensor, offsets)], shape=(6, 3), dtype=torch.float32)
    with pytest.raises(InvalidShards, match=rf"'a\.b'.*{what}"):
        describe_leaf("a.b", box)


@pytest.mark.parametrize(
    "piece", [np.ones(2), Packed(torch.ones(2)), torch.eye(2).to_sparse()], ids=["numpy", "wrapper", "sparse"]
)
def test_pieces_are_plain_tensors(piece: Any) -> None:
    box = ShardedBox.of([(piece, (0,) * len(piece.shape))], shape=tuple(piece.shape), dtype=torch.float32)
    with pytest.raises(UnsupportedLeaf, match="'k'"):
        describe_leaf("k", box)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_dtensor(mesh: DeviceMesh, placement: Any) -> None:
    full = torch.arange(12.0).reshape(4, 3)
    parameter = nn.Parameter(distribute_tensor(full, mesh, [placement]))
    leaf = describe_leaf("k", parameter)
    view = only(leaf)
    check_plain(view)
    assert torch.equal(view, full)
    assert view.data_ptr() == parameter._local_tensor.data_ptr()
    assert leaf.alias == describe_leaf("k", parameter._local_tensor).alias


def test_dtensor_edges(mesh: DeviceMesh) -> None:
    """Scalars, empty tensors and meta tensors are DTensors too; a wrapped local tensor is refused."""
    assert only(describe_leaf("k", distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]))).item() == 2
    assert describe_leaf("k", distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)])).pieces == ()
    on_meta = distribute_tensor(torch.empty(4, device="meta"), mesh, [Shard(0)])
    assert only(describe_leaf("k", on_meta, allow_meta=True)).is_meta
    with pytest.raises(UnsupportedLeaf, match="'k' is on the meta device"):
        describe_leaf("k", on_meta)
    wrapped = DTensor.from_local(PackedDetach(torch.ones(2)), mesh, [Replicate()], run_check=False)
    with pytest.raises(UnsupportedLeaf, match=r"'k'.*PackedDetach"):
        describe_leaf("k", wrapped)


def test_sharded_tensor_on_one_rank(mesh: DeviceMesh) -> None:
    """A ShardedTensor gives its local shards; one within another is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates ShardedTensor
        from torch.distributed._shard.sharded_tensor import Shard as TensorShard
        from torch.distributed._shard.sharded_tensor import init_from_local_shards

        values = [torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)]
        shards = [TensorShard.from_tensor_and_offsets(v, [2 * i, 0], rank=0) for i, v in enumerate(values)]
        sharded = init_from_local_shards(shards, 4, 3)
        leaf = describe_leaf("k", sharded)
        assert is_tensor(sharded)
        assert (leaf.dtype, leaf.shape) == (torch.float32, (4, 3))
        assert [p.offsets for p in leaf.pieces] == [(0, 0), (2, 0)]
        assert [p.tensor.data_ptr() for p in leaf.pieces] == [v.data_ptr() for v in values]

        assert materialize("k", sharded) is sharded

        shards[0].tensor = torch.empty(2, 3, device="meta")
        with pytest.raises(UnsupportedLeaf, match="'k' is a ShardedTensor on the meta device"):
            materialize("k", sharded)
        shards[0].tensor = sharded
        with pytest.raises(UnsupportedLeaf, match=r"'k' is sharded in two ways.*ShardedTensor"):
            describe_leaf("k", sharded)
        shards[0].tensor = torch.ones(1, 3)
        with pytest.raises(InvalidShards, match=r"'k': the shard at \(0, 0\) is \(1, 3\)"):
            describe_leaf("k", sharded)


def test_materialize_plain_tensors() -> None:
    """A meta tensor gets memory of the same shape and order of strides; anything else is returned as it is."""
    meta = torch.empty(2, 3, 4, device="meta", dtype=torch.bfloat16).permute(2, 0, 1)
    made = materialize("k", meta)
    assert (made.device.type, made.shape, made.stride(), made.dtype) == ("cpu", meta.shape, meta.stride(), meta.dtype)
    assert only(describe_leaf("k", made, writable=True)).data_ptr() == made.data_ptr()
    for real in (
        torch.ones(2),
        nn.Parameter(torch.ones(2)),
        np.ones(2),
        ShardedBox(torch.ones(2), offsets=(0,), shape=(2,)),
    ):
        assert materialize("k", real) is real
    with torch.device("meta"):  # a default device of meta is no place to load to
        assert materialize("k", torch.empty(2)).device.type == "cpu"


def test_materialize_keeps_the_kind() -> None:
    frozen = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    special = SpecialParameter(torch.empty(2, device="meta"))
    special.tensor_parallel = True
    tagged = torch.empty(2, device="meta", requires_grad=True).as_subclass(Tagged)
    tagged_parameter = nn.Parameter(torch.empty(2, device="meta").as_subclass(Tagged))
    for leaf in (frozen, special, tagged_parameter, nn.Parameter(torch.empty(2, device="meta"))):
        made = materialize("k", leaf)
        assert type(made) is type(leaf)
        assert isinstance(made, nn.Parameter)
        assert made.is_leaf
        assert not made.is_meta
        assert made.requires_grad == leaf.requires_grad
        assert vars(made) == vars(leaf)
    assert type(materialize("k", tagged)) is Tagged
    assert type(materialize("k", torch.empty(2, device="meta").as_subclass(Watched))) is Watched


def test_materialize_boxes() -> None:
    real = torch.ones(2)
    box = ShardedBox.of([(real, (0,)), (torch.empty(2, device="meta"), (2,))], shape=(4,), dtype=torch.float32)
    made = materialize("k", box)
    assert made.pieces[0][0] is real
    assert [offsets for _, offsets in made.pieces] == [(0,), (2,)]
    assert len(describe_leaf("k", made, writable=True).pieces) == 2


def test_materialize_dtensors(mesh: DeviceMesh) -> None:
    meta = nn.Parameter(distribute_tensor(torch.empty(3, 4, device="meta").t(), mesh, [Shard(1)]))
    meta.tensor_parallel = True
    made = materialize("k", meta)
    assert isinstance(made, DTensor)
    assert isinstance(made, nn.Parameter)
    assert made.requires_grad
    assert made.is_leaf
    assert made.tensor_parallel
    assert (made.placements, made.shape, made.stride()) == (meta.placements, meta.shape, meta.stride())
    assert made.device.type == "cpu"
    assert made._local_tensor.stride() == meta._local_tensor.stride()
    only(describe_leaf("k", made, writable=True)).fill_(3)
    assert made.full_tensor().sum().item() == 36


def test_materialize_refuses_what_it_cannot_make() -> None:
    wrapper = torch.Tensor._make_wrapper_subclass(Packed, (2,), device="meta")
    with pytest.raises(UnsupportedLeaf, match=r"'a\.b'.*Packed"):
        materialize("a.b", wrapper)


def pending() -> tuple[Any, ...]:
    """Collectives still under way, alone and inside a DTensor, and a partial sum."""
    mesh = init_device_mesh("cpu", (2,))
    gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)  # the latter is deprecated from 2.13 on
    alone = gather(torch.full((1,), float(dist.get_rank())), 0, mesh)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    replicated = partial.redistribute(placements=[Replicate()], async_op=True)
    was_pending = type(replicated._local_tensor) is funcol.AsyncCollectiveTensor
    with pytest.raises(UnsupportedLeaf, match=r"'k'.*not yet reduced"):
        describe_leaf("k", partial)
    return only(describe_leaf("k", alone)).tolist(), was_pending, only(describe_leaf("k", replicated)).tolist()


def test_pending_collectives(rank_pool: RankPool) -> None:
    """What a collective will bring is waited for; what was never reduced is refused."""
    assert rank_pool.run(2, pending) == [([0.0, 1.0], True, [2.0, 2.0])] * 2
