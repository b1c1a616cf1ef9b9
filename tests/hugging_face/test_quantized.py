"""Quantized models as plain numbers: bit for bit torch's, any slice, any number of files, in little memory."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import planner as their_plans
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import planner, state_dict_loader
from shardkeep.dcp._impl import hf_reader as quantized
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from tests.hugging_face.samples import INDEX, memory_used, shard
from tests.protocol.samples import quietly
from tests.toolkit.samples import mesh_of, numbered, seen, spread_out

ROWS, COLUMNS = 300, 200
LEAD, GROUPS, WIDTH = (2, 3), 5, 8
VALUES = GROUPS * WIDTH * 2
FP8, PACKED = "layer.weight", "mlp.w_blocks"
ALL_OF = {FP8: [(0, ROWS), (0, COLUMNS)], PACKED: [(0, LEAD[0]), (0, LEAD[1]), (0, VALUES)]}


def model(seed=0, block=128):
    """An 8-bit matrix with its scales, packed 4-bit values with theirs, and a plain tensor."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (ROWS, COLUMNS), dtype=torch.uint8, generator=generator)
    raw[(raw & 0x7F) == 0x7F] = 0  # no NaN: one is as good as another, and they compare unequal
    return {
        FP8: raw.view(torch.float8_e4m3fn),
        f"{FP8}_scale_inv": torch.rand(-(-ROWS // block), -(-COLUMNS // block), generator=generator) * 3,
        PACKED: torch.randint(0, 256, (*LEAD, GROUPS, WIDTH), dtype=torch.uint8, generator=generator),
        "mlp.w_scales": torch.randint(100, 160, (*LEAD, GROUPS), dtype=torch.uint8, generator=generator),
        "plain": numbered(4, 5),
    }


def save_model(folder, tensors, files=1):
    """Write a model as Hugging Face does, with scales in other files than weights where there are several."""
    homes = {key: f"model-{number % files + 1:05}-of-{files:05}.safetensors" for number, key in enumerate(tensors)}
    for name in set(homes.values()):
        save_file({key: tensors[key] for key in tensors if homes[key] == name}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return homes


class Into:
    def __init__(self, tensor):
        self.tensor = tensor

    def resolve_tensor(self, req):
        return self.tensor

    def commit_tensor(self, req, tensor):
        assert tensor.data_ptr() == self.tensor.data_ptr()


def request(plans, metadata_index, key, axes, box):
    offsets, sizes = ([a for a, _ in box], [n for _, n in box])
    index = metadata_index(key, [0] * axes)
    size = torch.Size
    return plans.ReadItem(plans.LoadItemType.TENSOR, index, size([0] * len(box)), index, size(offsets), size(sizes))


def by_torch(folder, key, box, homes, **options):
    reader = theirs.QuantizedHuggingFaceStorageReader(str(folder), **options)
    metadata = reader.read_metadata()
    [index] = [each for each in metadata.storage_data if each.fqn == key]
    req = request(their_plans, type(index), key, len(index.offset), box)
    target = torch.empty([n for _, n in box], dtype=options.get("target_dtype", torch.float32))
    with safe_open(folder / homes[key], framework="pt") as file:
        reader._process_read_request(file, req, Into(target))
    return target


def by_us(folder, key, box, **options):
    reader = QuantizedHuggingFaceStorageReader(str(folder), **options)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    [index] = [each for each in metadata.storage_data if each.fqn == key and len(each.offset) == len(box)]
    req = request(planner, type(index), key, len(box), box)
    target = torch.empty([n for _, n in box], dtype=options.get("target_dtype", torch.float32))
    reader.read_data(planner.LoadPlan([req]), Into(target)).wait()
    return target


def boxes(*sizes):
    def axis(size):
        return st.integers(0, size - 1).flatmap(lambda at: st.tuples(st.just(at), st.integers(1, size - at)))

    return st.tuples(*map(axis, sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(drawn=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_slice_is_torchs_bit_for_bit(tmp_path_factory, dtype, drawn):
    """Slices that begin and end inside blocks and groups, scales in other files, strips of any size: the same bits."""
    folder = tmp_path_factory.mktemp("model")
    homes = save_model(
        folder, model(drawn.draw(st.integers(0, 99)), block=64), files=drawn.draw(st.sampled_from([1, 3]))
    )
    before, quantized._STRIP_ELEMENTS = quantized._STRIP_ELEMENTS, drawn.draw(st.sampled_from([7, 1000, 1 << 18]))
    try:
        for key, box in [(FP8, drawn.draw(boxes(ROWS, COLUMNS))), (PACKED, drawn.draw(boxes(*LEAD, VALUES)))]:
            options = {"target_dtype": dtype, "block_size": 64}
            if quantized._STRIP_ELEMENTS == 7 and torch.Size([n for _, n in box]).numel() > 700:
                continue  # thousands of strips show nothing more
            assert seen(by_us(folder, key, box, **options)) == seen(by_torch(folder, key, box, homes, **options))
    finally:
        quantized._STRIP_ELEMENTS = before


def test_a_model_is_loaded_whole(tmp_path):
    """Through `load` all numbers arrive; torch's own planner and reader fill only the first few of each packed row."""
    tensors = model()
    homes = save_model(tmp_path, tensors, files=2)

    def blank():
        return {FP8: torch.zeros(ROWS, COLUMNS), PACKED: torch.full((*LEAD, VALUES), -7.0), "plain": torch.zeros(4, 5)}

    ours, other = blank(), blank()
    quietly(state_dict_loader.load, ours, storage_reader=QuantizedHuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    quietly(theirs.load, other, storage_reader=theirs.QuantizedHuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert seen(ours[FP8]) == seen(other[FP8])
    assert seen(ours["plain"]) == seen(tensors["plain"])
    full = by_torch(tmp_path, PACKED, ALL_OF[PACKED], homes)
    assert seen(ours[PACKED]) == seen(full)
    assert seen(other[PACKED][..., :GROUPS]) == seen(full[..., :GROUPS])
    assert bool((other[PACKED][..., GROUPS:] == -7).all())


def load_cut(folder, kind=QuantizedHuggingFaceStorageReader):
    mesh = mesh_of(dist.get_world_size())
    state = {
        FP8: spread_out(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), mesh, Cut(1)),
        PACKED: spread_out(torch.zeros(*LEAD, VALUES), mesh, Cut(2)),
        "plain": torch.zeros(4, 5),
    }
    reader = kind(folder, thread_count=2)
    quietly(state_dict_loader.load, state, storage_reader=reader)
    return [*(state[key].full_tensor() for key in (FP8, PACKED)), state["plain"]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_get_their_parts(rank_pool, tmp_path, ranks):
    homes = save_model(tmp_path, model())
    expected = [
        by_torch(tmp_path, FP8, ALL_OF[FP8], homes).bfloat16(),
        by_torch(tmp_path, PACKED, ALL_OF[PACKED], homes),
        numbered(4, 5),
    ]
    for found in rank_pool.run(ranks, load_cut, str(tmp_path)):
        assert seen(found) == seen(expected)


def test_quantized_shards_and_no_index(tmp_path):
    """Weights and scales that a distributed save cut are as good as whole ones; torch takes a shard for the whole."""
    tensors = model()
    (tmp_path / "whole").mkdir()
    homes = save_model(tmp_path / "whole", tensors)
    cut = tmp_path / "cut"
    halves = {
        FP8: (0, 170),
        f"{FP8}_scale_inv": (1, 1),
        PACKED: (2, 2),
        "mlp.w_scales": (0, 1),
    }  # axis, and where it is cut
    for number in range(2):
        parts = {}
        for key, (axis, at) in halves.items():
            sizes = [at, tensors[key].shape[axis] - at]
            offsets = [number * at if each == axis else 0 for each in range(tensors[key].dim())]
            parts[key] = tensors[key].split(sizes, dim=axis)[number], offsets
        shard(cut, number + 1, parts)
    state = {FP8: torch.zeros(ROWS, COLUMNS), PACKED: torch.zeros(*LEAD, VALUES)}
    quietly(state_dict_loader.load, state, storage_reader=QuantizedHuggingFaceStorageReader(str(cut)), no_dist=True)
    assert seen(state[FP8]) == seen(by_torch(tmp_path / "whole", FP8, ALL_OF[FP8], homes))
    packed = by_torch(tmp_path / "whole", PACKED, ALL_OF[PACKED], homes)
    assert seen(state[PACKED]) == seen(packed)


def test_a_state_made_from_the_model_has_plain_numbers(tmp_path):
    """A planner that makes the state from the metadata makes tensors of the target dtype and the unpacked size."""
    homes = save_model(tmp_path, model())
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=torch.bfloat16)
    state = quietly(state_dict_loader._load_state_dict_from_keys, {FP8, PACKED}, storage_reader=reader)
    assert state.keys() == {FP8, PACKED}
    options = {"target_dtype": torch.bfloat16}
    assert seen(state[FP8]) == seen(by_torch(tmp_path, FP8, ALL_OF[FP8], homes, **options))
    assert seen(state[PACKED]) == seen(by_torch(tmp_path, PACKED, ALL_OF[PACKED], homes, **options))


class Negating(QuantizedHuggingFaceStorageReader):
    """A user's reader on top of ours."""

    def _process_read_request(self, f, req, planner):
        super()._process_read_request(f, req, planner)
        planner.resolve_tensor(req).neg_()


class NegatingNumbers(QuantizedHuggingFaceStorageReader):
    """A user's own way to dequantize."""

    def _dequantize_tensor(self, weight, scale_inv, full_tensor_shape, slice_info):
        assert full_tensor_shape == (ROWS, COLUMNS)
        return -super()._dequantize_tensor(weight, scale_inv, full_tensor_shape, slice_info)

    def _dequantize_tensor_mxfp4(self, blocks, scales, req, group_start, offset_in_first_group):
        assert scales.shape == (*LEAD, GROUPS)
        return -super()._dequantize_tensor_mxfp4(blocks, scales, req, group_start, offset_in_first_group)


@pytest.mark.parametrize("kind", [Negating, NegatingNumbers])
def test_a_reader_on_top_of_it(rank_pool, tmp_path, kind):
    """A subclass that overrides a step of torch's reader is asked for every request, and may call ours."""
    homes = save_model(tmp_path, model())
    sign = -1 if kind is Negating else 1
    for found in rank_pool.run(3, load_cut, str(tmp_path), kind):
        assert seen(found[0]) == seen(-by_torch(tmp_path, FP8, ALL_OF[FP8], homes).bfloat16())
        packed = by_torch(tmp_path, PACKED, ALL_OF[PACKED], homes)
        assert seen(found[1]) == seen(-packed)
        assert seen(found[2]) == seen(sign * numbered(4, 5))


def test_scales_that_do_not_fit_are_named(tmp_path):
    for number, (change, said) in enumerate(
        [
            ({f"{FP8}_scale_inv": torch.rand(2, 2)}, "(?s)weight_scale_inv.*block_size=128"),
            ({"mlp.w_scales": torch.zeros(2, 3, 4, dtype=torch.uint8)}, "mlp.w_scales"),
            ({FP8: torch.zeros(2, 150, 200).to(torch.float8_e4m3fn)}, "Unsupported quantization"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        tensors = {**model(), **change}
        save_model(folder, tensors)
        state = {FP8: torch.zeros(tensors[FP8].shape), PACKED: torch.zeros(*LEAD, VALUES)}
        with pytest.raises(CheckpointException, match=said):
            quietly(
                state_dict_loader.load,
                state,
                storage_reader=QuantizedHuggingFaceStorageReader(str(folder)),
                no_dist=True,
            )


def test_memory_is_that_of_some_strips(tmp_path):
    rows, columns = 8192, 4096
    raw = torch.zeros(rows, columns, dtype=torch.uint8).fill_(0x38).view(torch.float8_e4m3fn)
    save_model(tmp_path, {FP8: raw, f"{FP8}_scale_inv": torch.full((rows // 128, columns // 128), 2.0)})
    del raw
    state = {FP8: torch.ones(rows, columns)}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path))
    with memory_used() as used:
        quietly(state_dict_loader.load, state, storage_reader=reader, no_dist=True)
    assert bool((state[FP8] == 2).all())
    python, everything = used
    assert python < 4 << 20
    assert everything < 64 << 20
