"""Each name of torch's protocol modules is in ours, with the same parameters, fields and methods."""

import dataclasses
import enum
import importlib
import inspect
import typing

import pytest

MODULES = [
    "metadata",
    "planner",
    "planner_helpers",
    "default_planner",
    "resharding",
    "storage",
    "api",
    "utils",
    "state_dict_saver",
    "state_dict_loader",
    "optimizer",
    "_dedup_tensors",
    "_dedup_save_plans",
]
# What other issues bring, or what is kept elsewhere here.
LATER = {
    "state_dict_saver": {"async_save", "AsyncCheckpointerType", "AsyncSaveResponse"},
    # Plans are cached in each planner, and not under names of classes.
    "default_planner": {"_create_global_plan_with_caching", "_finish_plan_with_caching"},
    "_dedup_tensors": {"init_logger"},
}


def defined_in(module):
    """The classes and functions that a module of torch makes itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) or inspect.isfunction(value)
        if getattr(value, "__module__", None) == module.__name__
    }


def pairs():
    for name in MODULES:
        theirs = importlib.import_module(f"torch.distributed.checkpoint.{name}")
        ours = importlib.import_module(f"shardkeep.dcp.{name}")
        for each, value in defined_in(theirs).items():
            if each not in LATER.get(name, ()):
                yield pytest.param(value, getattr(ours, each, None), id=f"{name}.{each}")


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("theirs", "ours"), list(pairs()))
def test_a_name_means_the_same(theirs, ours):
    """
    Functions take the same arguments; classes have the same fields, members and methods, with the same arguments.
    """
    assert ours is not None
    if inspect.isfunction(theirs):
        assert parameters(ours) == parameters(theirs)
        return
    assert issubclass(ours, BaseException) == issubclass(theirs, BaseException)
    if issubclass(theirs, enum.Enum):
        assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
        return
    if dataclasses.is_dataclass(theirs):
        assert fields(ours) == fields(theirs)
        assert ours.__dataclass_params__.frozen == theirs.__dataclass_params__.frozen
    for name, method in vars(theirs).items():
        if inspect.isfunction(method) and name not in LATER["default_planner"] and not name.startswith("__"):
            assert parameters(getattr(ours, name)) == parameters(method), name
    if "__init__" in vars(theirs):
        assert parameters(ours.__init__) == parameters(theirs.__init__)
    assert getattr(ours, "__abstractmethods__", set()) == getattr(theirs, "__abstractmethods__", set())


def fields(kind):
    return [(f.name, f.default, f.default_factory, f.compare) for f in dataclasses.fields(kind)]


def test_the_aliases_are_there():
    """
    The names that are types or settings, and not classes or functions, exist too.
    """
    from shardkeep.dcp import api, metadata, optimizer, utils

    assert typing.get_origin(api.WRAPPED_EXCEPTION) is tuple
    assert metadata.TensorStorageMetadata | metadata.BytesStorageMetadata == metadata.STORAGE_TYPES
    assert typing.get_origin(metadata.STATE_DICT_TYPE) is dict
    assert typing.get_origin(optimizer.STATE_DICT_2D_LAYOUT) is dict
    assert callable(utils._profile)
