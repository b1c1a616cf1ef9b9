"""Each name of torch's modules is in ours, with the same parameters and defaults."""

import importlib
import inspect

import pytest

TOOLKIT = {
    "_state_dict_utils": (
        "torch.distributed._state_dict_utils",
        (
            "CompanionMismatch _TensorInfo _identity_func _all_gather_sharded_tensor _iterate_state_dict _gather_state_dict "
            "_offload_state_dict_to_cpu _copy_state_dict _create_cpu_state_dict _check_state_dict_similarity "
            "_broadcast_tensors _distribute_tensors _broadcast_state_dict _distribute_state_dict _traverse_state_dict "
            "_flatten_state_dict _set_element _unflatten_state_dict PATH_ITEM OBJ_PATH FLATTEN_MAPPING STATE_DICT_TYPE "
            "CONTAINER_TYPE"
        ),
    ),
    "_sharded_tensor_utils": ("torch.distributed.checkpoint._sharded_tensor_utils", "_flatten_sharded_tensors"),
    "_nested_dict": (
        "torch.distributed.checkpoint._nested_dict",
        "flatten_state_dict unflatten_state_dict FLATTEN_MAPPING",
    ),
    "_traverse": (
        "torch.distributed.checkpoint._traverse",
        (
            "traverse_state_dict traverse_state_dict_v_2_3 set_element get_element print_tensor _print_nested "
            "_keep_visiting_tensors PATH_ITEM OBJ_PATH STATE_DICT_ITEM CONTAINER_TYPE"
        ),
    ),
}
NAMES = [(ours, theirs, name) for ours, (theirs, names) in TOOLKIT.items() for name in names.split()]


def parameters(func):
    """Names, kinds and defaults; of a default that is a function, its name."""
    return [
        (p.name, p.kind, getattr(p.default, "__name__", p.default)) for p in inspect.signature(func).parameters.values()
    ]


@pytest.mark.parametrize(("ours", "theirs", "name"), NAMES, ids=lambda value: value.rpartition(".")[2])
def test_a_name_of_torch_is_ours_too(ours, theirs, name):
    """The name exists, and a function takes the same arguments."""
    expected = getattr(importlib.import_module(theirs), name)
    found = getattr(importlib.import_module(f"shardkeep.dcp.{ours}"), name)
    if inspect.isfunction(expected):
        assert parameters(found) == parameters(expected)


def test_traverse_obj_goes_into_everything():
    """`_traverse_obj`, inside of a function in torch, is a function of its own."""
    from shardkeep.dcp._state_dict_utils import _traverse_obj

    met = []
    _traverse_obj(("a",), {"b": (1, [2])}, lambda path, value: met.append((path, value)))
    assert met == [(("a", "b", 0), 1), (("a", "b", 1, 0), 2)]
