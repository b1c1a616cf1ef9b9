"""The toolkit on an accelerator, in one process: host memory, companions, copies that do not block, gathers."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from shardkeep.state import collectives as stream
from shardkeep.state.collectives import broadcast_state_dict, distribute_state_dict, gather_state_dict
from shardkeep.state.offload import (
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    offload_state_dict_to_cpu,
)
from tests.toolkit.samples import CPU, in_chunks, numbered, seen

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")


@pytest.fixture(scope="module")
def device():
    """The accelerator, with this process as the only rank of a group that can talk from it and from the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(f"cpu:gloo,{accelerator.type}:{backend}", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device(accelerator.type, torch.accelerator.current_device_index())
    dist.destroy_process_group()


def tree_on(device):
    mesh = init_device_mesh(device.type, (1,))
    square = init_device_mesh(device.type, (1, 1))
    return {
        "w": numbered(64, 32).to(device),
        "half": numbered(7, 3, dtype=torch.bfloat16).to(device),
        "step": torch.tensor(5.0, device=device),
        "none": torch.empty(0, 4, device=device),
        "cut": distribute_tensor(numbered(9, 2).to(device), mesh, [Cut(0)]),
        "square": distribute_tensor(numbered(6, 6).to(device), square, [Cut(0), Cut(1)]),
        "same": distribute_tensor(numbered(4).to(device), mesh, [Replicate()]),
        "nested": [{"m": numbered(5).to(device)}, 3, None],
    }


def locals_of(tree):
    if isinstance(tree, torch.Tensor):
        return [getattr(tree, "_local_tensor", tree)]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for value in values for tensor in locals_of(value)]


def test_offload_brings_the_values_to_the_host(device):
    """All tensors are on the CPU with the bits they had, DTensors still DTensors."""
    tree = tree_on(device)
    moved = offload_state_dict_to_cpu(tree)
    assert {tensor.device for tensor in locals_of(moved)} == {CPU}
    assert seen(moved) == seen(tree)


@pytest.mark.parametrize(("pin", "share"), [(False, False), (True, False), (False, True), (True, True)])
def test_companions_are_pinned_shared_and_used_again(device, pin, share):
    """Every tensor of a companion is where it was asked to be, and takes new values in the same memory."""
    tree = tree_on(device)
    companion = create_cpu_state_dict(tree, pin_memory=pin, share_memory=share)
    tensors = [tensor for tensor in locals_of(companion) if tensor.numel()]
    assert {tensor.is_pinned() for tensor in tensors} == {pin}
    assert {tensor.is_shared() for tensor in tensors} == {share}
    assert check_state_dict_similarity(tree, companion)
    places = [tensor.data_ptr() for tensor in tensors]
    assert seen(copy_state_dict(tree, companion)) == seen(tree)
    for tensor in locals_of(tree):
        tensor.add_(1)
    again = copy_state_dict(tree, companion)
    assert seen(again) == seen(tree)
    assert [tensor.data_ptr() for tensor in locals_of(again) if tensor.numel()] == places


def test_registered_memory_is_given_back_when_it_is_freed(device):
    """Pinned and shared memory stays pinned while a view of it lives, and can be pinned again once it is gone."""
    for _ in range(50):
        made = create_cpu_state_dict({"w": torch.empty(1 << 20, device=device)}, pin_memory=True, share_memory=True)
        view = made["w"][10:]
        del made
        gc.collect()
        assert view.is_pinned()
        del view
    gc.collect()
    torch.accelerator.synchronize()


def test_a_copy_that_does_not_block_is_complete_after_the_stream(device):
    """Copies queued behind long work on the current stream are there, bit for bit, once it was synchronised."""
    tree = {f"t{i}": torch.zeros(1 << 20, device=device) for i in range(8)}
    companion = create_cpu_state_dict(tree, pin_memory=True)
    busy = torch.ones(4096, 4096, device=device)
    for _ in range(50):
        busy = busy @ busy * 0.0 + 1.0
    for i, tensor in enumerate(tree.values()):
        tensor.add_(busy[0, 0] * (i + 1))
    copied = copy_state_dict(tree, companion, non_blocking=True)
    torch.accelerator.current_stream(device).synchronize()
    assert seen(copied) == seen(tree)
    assert [value[0].item() for value in copied.values()] == [float(i + 1) for i in range(8)]


@pytest.mark.parametrize("pin", [False, True])
def test_a_blocking_copy_needs_no_synchronisation(device, pin):
    """The values are there on return, behind long work, in pinned and in pageable memory, and on a side stream."""
    tree = {f"t{i}": torch.zeros(1 << 20, device=device) for i in range(8)}
    companion = create_cpu_state_dict(tree, pin_memory=pin)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        busy = torch.ones(4096, 4096, device=device)
        for _ in range(50):
            busy = busy @ busy * 0.0 + 1.0
        for tensor in tree.values():
            tensor.add_(busy[0, 0])
        copied = copy_state_dict(tree, companion)
        found = [(value.min().item(), value.max().item()) for value in copied.values()]
    assert found == [(1.0, 1.0)] * 8


def test_a_companion_on_the_accelerator_is_filled_from_the_host(device):
    target = {"w": torch.zeros(1000, device=device)}
    copied = copy_state_dict({"w": numbered(1000)}, target)
    assert copied["w"] is target["w"]
    assert seen(copied) == seen({"w": numbered(1000)})


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_gather_on_one_rank(device, cpu_offload):
    """DTensors become full tensors where they are, or on the host; one that was offloaded is gathered all the same."""
    tree = tree_on(device)
    made = gather_state_dict({**tree, "away": tree["cut"].cpu()}, cpu_offload=cpu_offload)
    assert seen(made["cut"]) == seen(made["away"]) == seen(numbered(9, 2))
    assert seen(made["square"]) == seen(numbered(6, 6))
    assert {t.device.type for t in locals_of(made)} == {"cpu" if cpu_offload else device.type}


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_gather_of_a_sharded_tensor(device):
    """A ShardedTensor on the host is gathered on the host, or on the accelerator if asked to."""
    tree = {"chunks": in_chunks(numbered(9, 2))}
    assert seen(gather_state_dict(tree)["chunks"]) == seen(numbered(9, 2))
    assert seen(gather_state_dict(tree, device=device)["chunks"]) == seen(numbered(9, 2))


@pytest.mark.parametrize("put", [broadcast_state_dict, distribute_state_dict])
@pytest.mark.parametrize("start", ["device", "meta"])
def test_a_full_tree_is_put_into_one_on_the_accelerator(device, put, start, monkeypatch):
    """From the host, in many batches, into DTensors and plain tensors on the accelerator or on meta."""
    monkeypatch.setattr(stream, "BATCH_BYTES", 100)
    expected = tree_on(device)
    del expected["nested"]
    full = {key: value.cpu() for key, value in gather_state_dict(expected).items()}
    local = {
        key: torch.zeros_like(value) if start == "device" else torch.zeros_like(value).to("meta")
        for key, value in expected.items()
    }
    put(full, local, device)
    assert seen(local) == seen(expected)
    assert {t.device.type for key, t in zip(local, locals_of(local), strict=True) if key != "step"} == {device.type}
    assert local["step"].device == CPU


def test_an_offloaded_broadcast_ends_on_the_host(device):
    expected = tree_on(device)
    del expected["nested"]
    full = gather_state_dict(expected)
    local = {key: torch.zeros_like(value).to("meta") for key, value in expected.items()}
    broadcast_state_dict(full, local, device, cpu_offload=True)
    assert seen(local) == seen(expected)
    assert {t.device for t in locals_of(local)} == {CPU}
