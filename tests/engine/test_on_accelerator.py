"""Saves from an accelerator and loads into it: bit for bit, in the order of the caller's stream, through pinned memory."""

import re

import pytest
import torch

import shardkeep as sk
from shardkeep.engine import fill as fetch
from shardkeep.engine import workers as windows
from shardkeep.engine.pools import staging_memory
from shardkeep.engine.tensors import TorchScattered
from tests.engine.samples import all_dtypes, bits, random_tensor, raw_view

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
MIB = 1 << 20


def device(index=None):
    return torch.device(torch.accelerator.current_accelerator().type, index)


def moved(tensor, where):
    """The same bits elsewhere: there are dtypes that torch cannot copy."""
    return raw_view(tensor).to(where).view(tensor.dtype)


def sample(where, dtypes):
    state = {str(dtype): moved(random_tensor((7, 5), dtype, seed=1), where) for dtype in dtypes}
    state["long"] = moved(random_tensor((3, 1100, 1000), torch.float32, seed=2), where)
    state["columns"] = moved(random_tensor((900, 500), torch.float32, seed=3), where)[:, 7:300]
    state["turned"] = moved(random_tensor((900, 500), torch.bfloat16, seed=4), where).t()
    state["scalar"] = torch.tensor(1.5, device=where)
    state["many"] = [moved(random_tensor((i,), torch.bfloat16, seed=i), where) for i in range(1, 300)]
    state["host"] = random_tensor((50, 70), torch.float32, seed=5)
    return state


def empty_like(state):
    def other(tensor):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        raw_view(made).fill_(1)
        return made

    return {key: [other(t) for t in value] if isinstance(value, list) else other(value) for key, value in state.items()}


def whole_dtypes():
    """All but the integers of less than a byte, which torch has on few devices."""
    return [dtype for dtype in all_dtypes() if not re.fullmatch(r"torch\.u?int[1-7]", str(dtype))]


@pytest.fixture(params=["pinned", "ordinary"])
def memory(request, monkeypatch):
    """Windows of both kinds, however little there is to copy."""
    monkeypatch.setattr(windows, "_WORTH_PINNING_NBYTES", 0 if request.param == "pinned" else 1 << 60)
    return request.param


def test_state_on_an_accelerator_comes_back_bit_for_bit(tmp_path, memory):
    state = sample(device(0), whole_dtypes())
    sk.save(state, tmp_path)
    target = empty_like(state)
    sk.load(target, tmp_path, options=sk.Options(io_threads=4, host_budget_bytes=16 * MIB))
    assert bits(target) == bits(state)
    on_host = {key: torch.zeros(state[key].shape) for key in ("long", "columns")}
    sk.load(on_host, tmp_path, strict=False)
    assert all(bits(on_host[key]) == bits(state[key]) for key in on_host)
    if memory == "pinned":
        assert staging_memory().ring.nbytes > 0


def test_a_load_comes_between_what_the_caller_queued_before_and_after(tmp_path, memory):
    """Work queued on the caller's stream neither overwrites what was loaded nor sees what was there before."""
    state = {f"w{i}": torch.full((512, 1024), float(i), device=device(0)) for i in range(8)}
    sk.save(state, tmp_path)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    busy = torch.ones(3000, 3000, device=device(0))
    stream = torch.Stream(device(0))
    for _ in range(10):
        with stream:
            for _ in range(6):
                busy = busy @ busy * 1e-4
            for value in target.values():
                value.fill_(-1.0)
            sk.load(target, tmp_path)
            sums = {key: value.double().mean() for key, value in target.items()}
            for value in target.values():
                value.fill_(-2.0)
        stream.synchronize()
        assert {key: value.item() for key, value in sums.items()} == {f"w{i}": float(i) for i in range(8)}


def test_what_is_converted_is_converted_right(tmp_path, memory):
    full = torch.randn(700, 900, device=device(0))
    sk.save({"w": full}, tmp_path)
    target = {"w": torch.zeros(700, 900, dtype=torch.bfloat16, device=device(0))}
    sk.load(target, tmp_path, cast=True)
    assert bits(target["w"]) == bits(full.bfloat16())


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_threads_work_on_the_device_of_their_tensors(tmp_path, memory, monkeypatch):
    """Threads that fill the second device are on it, and so begin nothing on the first."""
    seen = set()

    class Noting(TorchScattered):
        def write_chunk(self, *chunk):
            seen.add(torch.accelerator.current_device_index())
            return super().write_chunk(*chunk)

    monkeypatch.setattr(fetch, "scattered_memory", Noting)
    sk.save({"w": torch.arange(4.0 * MIB)}, tmp_path)
    target = {"w": torch.zeros(4 * MIB, device=device(1))}
    sk.load(target, tmp_path)
    assert seen == {1}
    assert bits(target["w"]) == bits(torch.arange(4.0 * MIB))


def test_memory_is_flat_over_loads(tmp_path, memory):
    """The ring is made once: later loads pin nothing more, and device memory is as it was."""
    state = {f"w{i}": torch.randn(1024, 1024, device=device(0)) for i in range(16)}
    sk.save(state, tmp_path)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    sk.load(target, tmp_path)
    used = []
    for _ in range(5):
        sk.load(target, tmp_path)
        used.append((staging_memory().ring.nbytes, torch.accelerator.memory_allocated()))
    assert len(set(used)) == 1
    assert bits(target) == bits(state)
