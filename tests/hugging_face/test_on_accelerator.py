"""Hugging Face files with an accelerator: from its memory, into its memory, numbers of quantized models too."""

import pytest
import torch
import torch.distributed.checkpoint as theirs

from shardkeep.dcp import state_dict_loader
from shardkeep.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from tests.hugging_face.samples import by_library, full_state, load, same, save
from tests.protocol.samples import quietly
from tests.toolkit.samples import numbered, seen

pytestmark = [
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator"),
    pytest.mark.filterwarnings("ignore"),
]


def there(tensors):
    accelerator = torch.accelerator.current_accelerator()
    return {key: value.to(accelerator) for key, value in tensors.items()}


@pytest.mark.parametrize("reader", ["ours", "theirs"])
def test_tensors_come_and_go(tmp_path, reader):
    state = full_state()
    save("ours", there(state), tmp_path, no_dist=True)
    assert same(by_library(tmp_path), state) == []
    into = there({key: torch.zeros_like(value) for key, value in state.items()})
    load(reader, into, tmp_path, no_dist=True)
    assert same({key: value.cpu() for key, value in into.items()}, state) == []


def test_strided_tensors_are_copied_a_window_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDKEEP_HOST_BUDGET_BYTES", str(2 << 20))
    full = numbered(1500, 1000)
    save("ours", there({"w": full.t()}), tmp_path, no_dist=True)
    into = {"w": there({"w": torch.zeros(1500, 1000)})["w"].t()}
    load("ours", into, tmp_path, no_dist=True)
    assert seen(into["w"].t().cpu()) == seen(full)


def test_quantized_weights_arrive_as_torchs(tmp_path):
    from tests.hugging_face.test_quantized import COLUMNS, FP8, ROWS, model, save_model

    save_model(tmp_path, model())
    found = {}
    for side, call, reader in [
        ("ours", state_dict_loader.load, QuantizedHuggingFaceStorageReader),
        ("theirs", theirs.load, theirs.QuantizedHuggingFaceStorageReader),
    ]:
        state = there({FP8: torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)})
        quietly(call, state, storage_reader=reader(str(tmp_path)), no_dist=True)
        found[side] = state[FP8].cpu()
    assert seen(found["ours"]) == seen(found["theirs"])
