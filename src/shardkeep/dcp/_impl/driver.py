"""
`save` and `load`: the calls to a planner and a storage, in torch's order.

    save                                                      load
    all ranks     storage_meta, set_up_planner,               all ranks     read_metadata, set_up_planner,
                  set_up_storage_writer,                                    set_up_storage_reader,
                  create_local_plan, prepare_local_plan                     create_local_plan, prepare_local_plan
    coordinator   create_global_plan, prepare_global_plan     coordinator   create_global_plan, prepare_global_plan
    all ranks     finish_plan, write_data                     all ranks     finish_plan, read_data
    coordinator   finish

Where planner and storage are ours, the engine's sessions save and load instead (`default_save`, `default_load`). A planner
or a storage may be torch's: values that pass between it and one of ours are translated. All steps are made by all ranks
together, also where each rank has its own metadata.
"""

from __future__ import annotations

import cProfile
import functools
import inspect
import logging
import os
import pstats
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast
from uuid import uuid4

from torch import Tensor, nn
from torch.distributed import c10d_logger
from torch.distributed.logging_handlers import _log_handlers
from typing_extensions import deprecated

from shardkeep import errors, saving
from shardkeep.dcp._impl.default_load import DefaultTarget, loads_by_default
from shardkeep.dcp._impl.default_save import DefaultSave, saves_by_default
from shardkeep.dcp._impl.dist import _DistWrapper, in_step
from shardkeep.dcp._impl.file_reader import FileSystemReader, FsspecReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter, FsspecWriter, _FileSystemWriter
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, DefaultSavePlanner, _EmptyStateDictLoadPlanner
from shardkeep.dist.world import is_initialised
from shardkeep.engine.load_session import LoadSession
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import LoadEvents, Phases, SaveEvents
from shardkeep.engine.save_session import SaveSession
from shardkeep.engine.sources import find_committed
from shardkeep.layouts import torch_values as protocol
from shardkeep.options import Options, per_process
from shardkeep.storage.base import broken_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

log = logging.getLogger("shardkeep")
logger = logging.getLogger()

ENABLE_PROFILE = False
"""Set it to profile the coordinator's saves and loads."""
DCP_LOGGER_NAME = "dcp_logger"
_NAMED = ("storage_writer", "storage_reader", "planner")
_NOT_THERE = (FileNotFoundError, KeyError)
"""What readers raise if there is no checkpoint: those of files, and those that keep checkpoints in a dict."""


# -- the log of calls --------------------------------------------------------------------------------------------------
#
# Each step is logged on torch's logger by two messages, which are dicts, at level DEBUG: event "start" and "end", with the
# checkpoint, the ranks, the time and, at the end, the duration in nanoseconds; and, where asked for, "exception" at level
# ERROR. The logger has no handler unless the user adds one.


_log_handlers.setdefault(DCP_LOGGER_NAME, logging.NullHandler())
_dcp_logger: logging.Logger = c10d_logger._get_or_create_logger(DCP_LOGGER_NAME)


def _dcp_method_logger(
    log_exceptions: bool = False, **wrapper_kwargs: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Log each call of a function, with these arguments besides the keyword arguments of the call."""

    def decorator(func: Callable[P, T]) -> Callable[P, T]:
        return functools.wraps(func)(logged(func, func.__name__, log_exceptions=log_exceptions, **wrapper_kwargs))

    return decorator


def _is_handled() -> bool:
    """Return whether anything sees torch's log: making two messages for each of ten thousand values takes time."""
    handled = any(type(each) is not logging.NullHandler for each in _dcp_logger.handlers)
    return handled or bool(_dcp_logger.filters) or _dcp_logger.propagate


def logged(func: Callable[P, T], name: str, *, log_exceptions: bool = False, **known: Any) -> Callable[P, T]:
    """Return a function that logs each call under a name."""

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _is_handled():
            return func(*args, **kwargs)
        began = time.time_ns()
        message = _get_msg_dict(name, *args, **{**known, **kwargs}) | {"log_exceptions": log_exceptions}
        # A new dict for each message, because a handler may keep it.
        _dcp_logger.debug({**message, "event": "start", "time": began})
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            if log_exceptions:
                ended = time.time_ns()
                _dcp_logger.error({**message, "event": "exception", "error": str(error), "time": ended})  # noqa: TRY400
            raise
        ended = time.time_ns()
        _dcp_logger.debug({**message, "event": "end", "time": ended, "times_spent": ended - began})
        return result

    return wrapper


def step_logger(storage: object, group: object) -> Callable[[Callable[P, T], str], Callable[P, T]]:
    """Return `logged` for the steps of a call: messages name the checkpoint and the ranks, if the storage has an id."""
    checkpoint_id = getattr(storage, "checkpoint_id", None)
    known = {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id, "process_group": group}
    return functools.partial(logged, **known)


def _msg_dict_from_dcp_method_args(*args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ARG001 - torch's arguments
    storage = kwargs.get("storage_writer") or kwargs.get("storage_reader")
    checkpoint_id = kwargs.get("checkpoint_id") or getattr(storage, "checkpoint_id", None)
    message = {"checkpoint_id": None if checkpoint_id is None else str(checkpoint_id), "uuid": str(uuid4().int)}
    return message | {name: type(kwargs[name]).__name__ for name in _NAMED if kwargs.get(name)}


def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return _msg_dict_from_dcp_method_args(*args, **kwargs) | c10d_logger._get_msg_dict(func_name, *args, **kwargs)


def _init_logger(rank: int) -> None:
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(f"[{rank}] %(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(handler)


@contextmanager
def _profile() -> Iterator[None]:
    """Profile the block on rank 0 and print the result, if `ENABLE_PROFILE` is set."""
    if not ENABLE_PROFILE or (is_initialised() and sys.modules["torch.distributed"].get_rank() != 0):
        yield
        return
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        yield
    finally:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("time").print_stats(10)


def _api_bc_check(func: F) -> F:
    """Accept a storage as the second positional argument, as old versions did, with a warning."""
    keywords = [p.name for p in inspect.signature(func).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2:
            return func(*args, **kwargs)
        name = next((each for each in ("storage_writer", "storage_reader") if each in keywords), None)
        if name is None:
            raise errors.BrokenProtocol(f"{func.__name__} takes one positional argument, and two were given")
        warnings.warn(f"the second argument of {func.__name__} should be given as {name}=", stacklevel=2)
        if name in kwargs:
            raise errors.BrokenProtocol(f"{name} was given twice to {func.__name__}")
        return func(args[0], **{name: args[1]}, **kwargs)

    return call  # type: ignore[return-value]  # same arguments, see `wraps`


def takes(function: Callable[..., Any], *names: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return True
    return set(names) <= {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}


def _storage_setup(storage: S | None, checkpoint_id: str | os.PathLike[str] | None, reader: bool = False) -> S:
    """Return the storage, reset to the checkpoint; without one, local files and stores first, then fsspec."""
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)  # type: ignore[attr-defined]  # every storage has it
        return storage
    kind = "storage_reader" if reader else "storage_writer"
    if not checkpoint_id:
        raise errors.NoStorage(f"`checkpoint_id` must be specified if {kind} is None")
    kinds: tuple[type[Any], ...] = (FileSystemReader, FsspecReader) if reader else (FileSystemWriter, FsspecWriter)
    for each in kinds:
        if each.validate_checkpoint_id(checkpoint_id):
            chosen: Any = each(checkpoint_id)
            if not reader:
                chosen._splits_files = True
            return cast("S", chosen)
    raise errors.NoStorage(
        f"Cannot detect which storage {os.fspath(checkpoint_id)!r} is in",
        hint=f"check that the directory exists or can be created, or pass a {kind}",
    )


def is_alone(no_dist: bool) -> bool:
    """Return whether a call involves this process only: because `no_dist` was given, or there are no other ranks."""
    return no_dist or not is_initialised()


def without_ranks(no_dist: bool, verb: str, *, decorators: int) -> bool:
    """Return whether a call involves this process only; if so, warn where the decorated function was called."""
    alone = is_alone(no_dist)
    if alone:
        warnings.warn(f"torch.distributed is not in use: this process {verb} on its own", stacklevel=3 + decorators)
    return alone


_STATELESS = {Tensor, nn.Parameter, dict, int, float, str}
"""Known by their type: to ask a hundred thousand tensors for a method that they lack takes time."""


def is_stateful(value: object) -> bool:
    return type(value) not in _STATELESS and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def state_of(value: Any) -> Any:
    return value.state_dict() if is_stateful(value) else value


@_dcp_method_logger(log_exceptions=True)
def _stateful_to_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state in which stateful values are replaced by their state; how long each of them takes is logged."""
    if not _is_handled():
        stateful = {*map(type, state_dict.values())} - _STATELESS
        return {key: state_of(value) for key, value in state_dict.items()} if stateful else dict(state_dict)
    return {
        key: logged(state_of, f"_stateful_to_state_dict.{key}", log_exceptions=True)(value)
        for key, value in state_dict.items()
    }


def modules_in(state_dict: Mapping[str, Any]) -> list[nn.Module]:
    """Return the modules of a state, whose buffers are known to be buffers."""
    if {*map(type, state_dict.values())} <= _STATELESS:
        return []
    return [value for value in state_dict.values() if isinstance(value, nn.Module)]


# -- writers and planners that several saves use ------------------------------------------------------------------------
#
# Writers and planners hold the state of a save. A save therefore waits for asynchronous ones that began before it and use one
# of the same objects.


class SaveUnderWay(NamedTuple):
    """An asynchronous save, and the writer and the planner that it uses."""

    handle: SaveHandle[Any]
    uses: set[int]
    """The ids of both: nothing here may keep alive the state that they hold."""
    thread: Callable[[], int | None]
    """Returns the id of the thread that runs it, once there is one."""


_under_way = per_process(list[SaveUnderWay])  # in the order of the calls; saves outlive them


def note_save(handle: SaveHandle[Any], *uses: object, thread: Callable[[], int | None]) -> None:
    saves = _under_way()
    saves[:] = [each for each in saves if not each.handle.done()]
    saves.append(SaveUnderWay(handle, _ids(uses), thread))


def saves_using(*objects: object) -> list[SaveUnderWay]:
    """Return the asynchronous saves that have not ended and use one of these objects, which may be None."""
    return [each for each in _under_way() if not each.handle.done() and each.uses & _ids(objects)]


def _ids(objects: Sequence[object]) -> set[int]:
    return {id(each) for each in objects if each is not None}


def wait_for(saves: Sequence[SaveUnderWay], what: str) -> None:
    """Wait for earlier saves before one to `what`; those of this thread enclose it, or come after it."""
    for each in saves:
        if each.thread() != threading.get_ident() and not each.handle.done():
            log.warning("a save to %s waits for the one to %s, which uses the same objects", what, each.handle.where)
            each.handle.outcome()


def destination_of(checkpoint_id: str | os.PathLike[str] | None, storage_writer: object) -> str:
    place = checkpoint_id if checkpoint_id is not None else getattr(storage_writer, "checkpoint_id", None)
    return f"{os.fspath(place)!r}" if isinstance(place, (str, os.PathLike)) else type(storage_writer).__qualname__


@_api_bc_check
@_dcp_method_logger(log_exceptions=True)
def save(
    state_dict: protocol.STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: protocol.StorageWriter | None = None,
    planner: protocol.SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> protocol.Metadata:
    """
    Save a distributed state; each rank writes its own part. Return the metadata of what was saved, on every rank.

    For top-level values with `state_dict` and `load_state_dict`, the result of `state_dict` is saved. If a rank fails,
    `CheckpointException` is raised on all of them, with the errors of all.

    Args:
        state_dict: This rank's part of the state.
        checkpoint_id: Where to save; its meaning depends on the storage.
        storage_writer: Writes the data.
        planner: Decides what is written; by default everything, replicated values once.
        process_group: The ranks that save; all of them by default.
        no_dist: Save in this process only.
        use_collectives: If False, each rank writes a checkpoint of its own, with its own metadata.

    """
    no_dist = without_ranks(no_dist, "saves", decorators=2)
    wait_for(saves_using(storage_writer, planner), destination_of(checkpoint_id, storage_writer))
    with _profile():
        writer = _storage_setup(storage_writer, checkpoint_id)
        ranks = _DistWrapper(process_group, not no_dist, coordinator_rank=0)
        state = in_step(ranks, lambda: _stateful_to_state_dict(state_dict))
        return run_save(ranks, state, writer, planner, use_collectives, modules_in(state_dict))


@deprecated("`save_state_dict` is deprecated: use `save`", category=FutureWarning)
def save_state_dict(
    state_dict: protocol.STATE_DICT_TYPE,
    storage_writer: protocol.StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: protocol.SavePlanner | None = None,
) -> protocol.Metadata:
    """Save a state without replacing stateful values by their state. Deprecated: use `save`."""
    wait_for(saves_using(storage_writer, planner), destination_of(None, storage_writer))
    with _profile():
        storage_writer.reset()
        return _save_state_dict(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner)


def _save_state_dict(
    state_dict: protocol.STATE_DICT_TYPE,
    storage_writer: protocol.StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: protocol.SavePlanner | None = None,
    use_collectives: bool = True,
) -> protocol.Metadata:
    ranks = _DistWrapper(process_group, not no_dist, coordinator_rank)
    return run_save(ranks, lambda: state_dict, storage_writer, planner, use_collectives)


def run_save(
    ranks: _DistWrapper,
    state: Callable[[], protocol.STATE_DICT_TYPE],
    storage_writer: protocol.StorageWriter,
    planner: protocol.SavePlanner | None,
    use_collectives: bool,
    modules: Sequence[nn.Module] = (),
) -> protocol.Metadata:
    """Save a state, with that of `modules`: in the engine's session if planner and writer are ours, else item by item."""
    if use_collectives and saves_by_default(storage_writer, planner):
        layout, session, events = default_session(ranks, storage_writer, planner, modules)
        committed, _ = saving.save_in_session(session, events, state)
        return layout.metadata(committed)
    call = _Save(ranks, state, storage_writer, planner, use_collectives)
    with ranks.call() as together:
        saved: protocol.Metadata = run_steps(together, call, use_collectives, step_logger(storage_writer, ranks.group))
    return saved


def default_session(
    ranks: _DistWrapper,
    writer: FileSystemWriter,
    planner: protocol.SavePlanner | None,
    modules: Sequence[nn.Module],
    *,
    copies: bool = False,
) -> tuple[DefaultSave, SaveSession, SaveEvents]:
    """Begin a save by the default planner; `copies`: the state may change as soon as it is described."""
    own = cast("DefaultSavePlanner", planner or DefaultSavePlanner())
    layout = DefaultSave(writer, own, ranks, modules, copies)
    phases, store, log_step = Phases(), layout.store, step_logger(writer, ranks.group)
    session = SaveSession(layout, store, ranks._world, Options(), phases=phases, meet=ranks.call, logged=log_step)
    return layout, session, SaveEvents(phases, rank=ranks._world.rank, where=store.url)


def run_steps(ranks: _DistWrapper, call: Any, use_collectives: bool, log_step: Callable[..., Any] = logged) -> Any:
    """Make the steps of a save together with the other ranks: of a `_Save`, or of one in another process."""
    local_step = log_step(call.plan, "local_step")
    global_step = log_step(call.decide, "global_step")
    write_data = log_step(call.write, "write_data")
    finish_checkpoint = log_step(call.finish, "finish_checkpoint")
    if not use_collectives:
        # One step for everything: ranks need nothing from each other, but each must learn when another one fails.
        mine: list[Any] = []

        def alone() -> None:
            [plan] = global_step([local_step()])
            mine.append(finish_checkpoint([write_data(plan)], call.alone_s()))

        ranks.all_gather("write", alone)
        if ranks.is_coordinator:
            call.supersede_common()
        return mine[0]

    def decide(plans: list[Any]) -> list[tuple[Any, float]]:
        decided = global_step(plans)
        alone_s = call.alone_s()
        return [(plan, alone_s) for plan in decided]

    plan, alone_s = ranks.reduce_scatter("plan", local_step, decide)
    try:
        return ranks.patient(alone_s).all_reduce(
            "write", lambda: write_data(plan), lambda results: finish_checkpoint(results, alone_s)
        )
    except errors.CheckpointException as failed:
        # The coordinator commits only if no rank failed. If the coordinator itself failed, only it knows whether that was
        # before the commit.
        if ranks.coordinator_rank not in failed.failures or (ranks.is_coordinator and not call.finishing):
            call.discard()
        raise


class _Save:
    def __init__(
        self,
        ranks: Any,
        state: Callable[[], protocol.STATE_DICT_TYPE],
        storage_writer: protocol.StorageWriter,
        planner: protocol.SavePlanner | None,
        use_collectives: bool,
    ) -> None:
        """Of `ranks`, `rank` and `is_coordinator` are used."""
        self._ranks = ranks
        self._state = state
        self._planner = planner = DefaultSavePlanner() if planner is None else planner
        self._writer = storage_writer
        self._use_collectives = use_collectives
        self._to_writer = protocol.translator(planner, storage_writer)
        self._to_planner = protocol.translator(storage_writer, planner)
        self._metadata: Any = None
        self.finishing = False
        """Whether the coordinator has started to commit."""

    def plan(self) -> protocol.SavePlan:
        state_dict, leads = self._state(), self._ranks.is_coordinator
        storage_meta = self._to_planner(self._writer.storage_meta())
        if "storage_meta" in inspect.signature(self._planner.set_up_planner).parameters:
            self._planner.set_up_planner(state_dict=state_dict, storage_meta=storage_meta, is_coordinator=leads)
        else:
            warnings.warn(
                f"{type(self._planner).__qualname__}.set_up_planner should take storage_meta as its second argument",
                stacklevel=2,
            )
            self._planner.set_up_planner(state_dict, leads)  # the signature of old planners
        if takes(self._writer.set_up_storage_writer, "rank", "use_collectives"):
            self._writer.set_up_storage_writer(leads, rank=self._ranks.rank, use_collectives=self._use_collectives)
        else:
            self._writer.set_up_storage_writer(leads)
        plan = self._to_writer(self._planner.create_local_plan())
        return self._writer.prepare_local_plan(plan)

    def decide(self, plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        decided, self._metadata = self._planner.create_global_plan(self._to_planner(plans))
        final = self._writer.prepare_global_plan(self._to_writer(list(decided)))
        return self._writer._settle_plans(final) if isinstance(self._writer, _FileSystemWriter) else final

    def alone_s(self) -> float:
        """Return how many seconds the coordinator may still work when the other ranks are done."""
        if not isinstance(self._writer, _FileSystemWriter) or self._metadata is None:
            return 0.0
        return self._writer._alone_s(self._metadata)

    def write(self, plan: protocol.SavePlan) -> list[protocol.WriteResult]:
        final = self._to_writer(self._planner.finish_plan(self._to_planner(plan)))
        if not plan.usable and plan.storage_data is not None:
            # The planner returned its cached plan of an earlier save; the writer's data for this save are in `plan`.
            final = replace(final, storage_data=plan.storage_data)
        writes = self._writer.write_data(final, self._planner)
        writes.wait()
        return writes.value()

    def discard(self) -> None:
        """Remove what this rank has written of a save that failed, if the writer can."""
        if isinstance(self._writer, _FileSystemWriter):
            self._writer._discard_written()

    def supersede_common(self) -> None:
        """Remove the metadata of all ranks together, where each rank has written its own."""
        if isinstance(self._writer, _FileSystemWriter):
            self._writer._commit().supersede_common()

    def finish(self, results: list[list[protocol.WriteResult]], alone_s: float = 0.0) -> protocol.Metadata:
        self.finishing = True
        if self._metadata is None:
            raise errors.BrokenProtocol(
                "create_global_plan returned no metadata", hint="return the plans and the metadata"
            )
        # In the writer's classes, including every index: the writer may pickle them.
        metadata = self._to_writer(self._metadata)
        self._writer.finish(metadata=metadata, results=self._to_writer(results))
        finished: protocol.Metadata = protocol.to_ours(metadata)
        return finished


@_api_bc_check
@_dcp_method_logger(log_exceptions=True)
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: protocol.StorageReader | None = None,
    planner: protocol.LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """
    Fill a distributed state; each rank reads its own part. All ranks must pass the same keys.

    Tensors are filled in place, other values are replaced. For top-level values with `state_dict` and
    `load_state_dict`, their state is filled and given back to them. If a rank fails, `CheckpointException` is raised on
    all of them.

    Args:
        state_dict: This rank's part of the state.
        checkpoint_id: Where to load from; its meaning depends on the storage.
        storage_reader: Reads the data.
        planner: Decides what is read; by default every value of the state.
        process_group: The ranks that load; all of them by default.
        no_dist: Load in this process only.

    """
    no_dist = without_ranks(no_dist, "loads", decorators=2)
    with _profile():
        reader = _storage_setup(storage_reader, checkpoint_id, reader=True)
        # Sorted, because objects that communicate in `state_dict` must be called in the same order on all ranks.
        keys = sorted(state_dict)
        ranks = _DistWrapper(process_group, not no_dist, coordinator_rank=0)
        state = in_step(ranks, lambda: {key: state_of(state_dict[key]) for key in keys})
        _run_load(ranks, state, reader, planner)
        filled = state()
        for key in keys:
            if is_stateful(state_dict[key]):
                state_dict[key].load_state_dict(filled[key])
            else:
                state_dict[key] = filled[key]


@deprecated("`load_state_dict` is deprecated: use `load`", category=FutureWarning)
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: protocol.StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: protocol.LoadPlanner | None = None,
) -> None:
    """Fill a state without replacing stateful values by their state. Deprecated: use `load`."""
    storage_reader.reset()
    with _profile():
        _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: protocol.StorageReader | None = None,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return a checkpoint, whole and on the CPU; "model" stands for "model.weight" and "model.bias"."""
    no_dist = without_ranks(no_dist=False, verb="loads", decorators=0)
    reader = _storage_setup(storage_reader, checkpoint_id, reader=True)
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={keys} if isinstance(keys, str) else keys)
    _load_state_dict(state, reader, process_group, no_dist=no_dist, planner=planner)
    return state


def _load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: protocol.StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: protocol.LoadPlanner | None = None,
) -> None:
    _run_load(_DistWrapper(process_group, not no_dist, coordinator_rank), lambda: state_dict, storage_reader, planner)


def _run_load(
    ranks: _DistWrapper,
    state: Callable[[], dict[str, Any]],
    storage_reader: protocol.StorageReader,
    planner: protocol.LoadPlanner | None,
) -> None:
    """Fill a state: in the engine's session if planner and reader are ours, else item by item."""
    planner = planner or DefaultLoadPlanner()
    with ranks.call("load") as together:
        if not loads_by_default(storage_reader, planner) or not _load_by_default(
            together, state, storage_reader, cast("DefaultLoadPlanner", planner)
        ):
            _load_items(together, state, storage_reader, planner)


def _load_by_default(
    ranks: _DistWrapper, state: Callable[[], dict[str, Any]], reader: FileSystemReader, planner: DefaultLoadPlanner
) -> bool:
    """Load in the engine's session; False if there is no checkpoint of all ranks that it can open."""
    target = DefaultTarget(state, reader, planner)
    phases, store, log_step = Phases(), reader.open_store(), step_logger(reader, ranks.group)
    session = LoadSession(target, store, ranks._world, ranks.agree, phases, Options(), complete=False, logged=log_step)
    try:
        opened = session.open(find_committed)
    except errors.CheckpointException as failed:
        causes = [error for error, _ in failed.failures.values()]
        if any(isinstance(error, (errors.RanksDisagree, errors.RanksSilent)) for error in causes):
            raise  # the ranks that do not load would not take part in the next step either
        if not all(isinstance(error, (errors.CheckpointError, OSError)) for error in causes):
            raise
        return False  # perhaps each rank has metadata of its own; if not, the reader says what is wrong
    events = LoadEvents(phases, rank=ranks._world.rank, where=store.url)
    with events.reporting():
        _, report = session.load(opened)
    events.finished(report)
    return True


def _load_items(
    ranks: _DistWrapper,
    state: Callable[[], dict[str, Any]],
    reader: protocol.StorageReader,
    planner: protocol.LoadPlanner,
) -> None:
    """Load item by item: planner and reader are called in torch's order."""
    to_reader, to_planner = protocol.translator(planner, reader), protocol.translator(reader, planner)

    def local_step() -> tuple[bool, protocol.LoadPlan]:
        """Return whether the metadata are those of all ranks, and this rank's plan."""
        state_dict, leads = state(), ranks.is_coordinator
        metadata, common = _read_metadata(reader, ranks.rank)
        planner.set_up_planner(state_dict, protocol.to_classes_of(planner, metadata), leads)
        if takes(reader.set_up_storage_reader, "rank", "use_collectives"):
            reader.set_up_storage_reader(metadata, leads, rank=ranks.rank, use_collectives=common)
        else:
            reader.set_up_storage_reader(metadata, leads)
        return common, reader.prepare_local_plan(to_reader(planner.create_local_plan()))

    def global_step(reports: list[tuple[bool, protocol.LoadPlan]]) -> list[protocol.LoadPlan]:
        found = [rank for rank, (common, _) in enumerate(reports) if common]
        if 0 < len(found) < len(reports):
            raise errors.RanksDisagree(
                f"only ranks {found} of {len(reports)} found the checkpoint's metadata, the others only their own",
                hint="wait until all ranks see the same files, or delete those of the older of two checkpoints",
            )
        plans = planner.create_global_plan(to_planner([plan for _, plan in reports]))
        return list(reader.prepare_global_plan(to_reader(list(plans))))

    def read_data() -> None:
        reads = reader.read_data(to_reader(planner.finish_plan(to_planner(plan))), planner)
        reads.wait()
        # A reader that fails in the background reports it only through its future.
        reads.value()

    log_step: Callable[..., Any] = step_logger(reader, ranks.group)
    plan = ranks.reduce_scatter("plan", log_step(local_step, "local_step"), log_step(global_step, "global_step"))
    ranks.all_gather("read", log_step(read_data, "read_data"))


def _read_metadata(reader: protocol.StorageReader, rank: int) -> tuple[protocol.Metadata, bool]:
    """Return the checkpoint's metadata and True or, only if there are none, those of this rank alone and False."""
    # If the checkpoint's metadata exist but cannot be read, the rank's own were left by an older save.
    causes = ["metadata is None"]
    try:
        if (metadata := reader.read_metadata()) is not None:
            return metadata, True
    except Exception as error:  # the storage may be the user's
        causes.append(f"global metadata read failed: {error}")
        if not isinstance(error, _NOT_THERE):
            hint = "the checkpoint may be intact: try again, or find out what is wrong with its metadata"
            raise errors.NoMetadata("; ".join(causes), hint=hint) from error
    if takes(reader.read_metadata, "rank"):
        try:
            if (metadata := reader.read_metadata(rank=rank)) is not None:
                log.warning("the checkpoint has no common metadata; this rank's own are used")
                return metadata, False
        except Exception as error:  # noqa: BLE001 - the storage may be the user's; raised below
            causes.append(f"rank local metadata read failed: {error}")
    broken = broken_path(reader.readable_store(), inside=True) if isinstance(reader, FileSystemReader) else ""
    raise errors.NoMetadata("; ".join(causes), hint=broken or "is there a complete checkpoint at this place?")
