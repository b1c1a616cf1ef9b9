"""Each name of torch's Hugging Face modules is in ours, with the same parameters."""

import importlib
import inspect

import pytest

MODULES = ["hf_storage", "_hf_utils", "quantized_hf_storage", "_consolidate_hf_safetensors"]
# How torch consolidates: through whole tensors in memory, which is what ours does not do.
OTHERWISE = {
    "_FqnData", "_OutputFileData", "_InputFileData", "_parse_input_metadata", "_write_metadata", "_read_tensor_data", "_read_tensor_data_mmap",
    "_process_output_file", "_write_data", "_write_sub_tensor_to_file_optimized", "_calculate_max_contiguous_elements",
    "_write_overall_metadata_file", "_consolidate_safetensors_files",
}  # fmt: skip


def pairs():
    for name in MODULES:
        theirs = importlib.import_module(f"torch.distributed.checkpoint.{name}")
        ours = importlib.import_module(f"shardkeep.dcp.{name}")
        for each, value in vars(theirs).items():
            home = getattr(value, "__module__", "torch.distributed.checkpoint._hf_utils")
            if inspect.ismodule(value):
                continue
            if home == theirs.__name__ and not each.startswith("__") and each not in OTHERWISE | {"logger"}:
                yield pytest.param(value, getattr(ours, each, None), id=f"{name}.{each}")


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("theirs", "ours"), list(pairs()))
def test_a_name_means_the_same(theirs, ours):
    """Constants are equal; functions, constructors and methods take the same arguments."""
    assert ours is not None
    if inspect.isfunction(theirs):
        assert parameters(ours) == parameters(theirs)
    elif inspect.isclass(theirs):
        assert parameters(ours.__init__) == parameters(theirs.__init__)
        for name, method in vars(theirs).items():
            if inspect.isfunction(method) and not name.startswith("__"):
                assert parameters(getattr(ours, name)) == parameters(method), name
    elif isinstance(theirs, dict):
        assert {key: ours[key] for key in theirs} == theirs
    else:
        assert ours == theirs


def test_attributes_are_torchs(tmp_path):
    """What people read and set on readers and writers is there."""
    for module, name in [
        ("hf_storage", "HuggingFaceStorageWriter"),
        ("hf_storage", "HuggingFaceStorageReader"),
        ("quantized_hf_storage", "QuantizedHuggingFaceStorageReader"),
    ]:
        theirs = getattr(importlib.import_module(f"torch.distributed.checkpoint.{module}"), name)(str(tmp_path))
        ours = getattr(importlib.import_module(f"shardkeep.dcp.{module}"), name)(str(tmp_path))
        assert vars(theirs).keys() - vars(ours).keys() == set()
