"""Files whose tensors follow each other without padding, so that elements do not begin at multiples of their size."""

import json
import struct

import pytest
import torch

from shardkeep import dcp
from shardkeep.dcp.hf_storage import HuggingFaceStorageReader
from shardkeep.engine import reader as read


@pytest.mark.filterwarnings("ignore:torch.distributed is not in use")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as stored", "converted"])
def test_elements_cut_by_windows_are_loaded(tmp_path, monkeypatch, dtype):
    """Tensors with gaps, of the stored dtype or another, get every element, though windows end inside of some."""
    monkeypatch.setattr(read, "_CACHED_STEP_NBYTES", 4096)
    stored = {
        "a": torch.arange(21, dtype=torch.uint8).reshape(3, 7),
        "b": torch.arange(64 * 130, dtype=torch.float32).reshape(64, 130),
        "c": torch.arange(210, dtype=torch.uint8).reshape(30, 7),
    }
    header, payload = {}, b""
    for key, tensor in stored.items():
        name = {torch.uint8: "U8", torch.float32: "F32"}[tensor.dtype]
        offsets = [len(payload), len(payload) + tensor.nbytes]
        header[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": offsets}
        payload += tensor.numpy().tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + payload)

    loaded = {
        key: torch.zeros(len(tensor), 2 * tensor.shape[1], dtype=dtype if key == "b" else tensor.dtype)[:, ::2]
        for key, tensor in stored.items()
    }
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for key, tensor in stored.items():
        assert torch.equal(loaded[key], tensor.to(loaded[key].dtype)), key
