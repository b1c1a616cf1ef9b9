"""What is logged of a save and of a load: torch's messages."""

import contextlib
import logging
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torchs

from shardkeep.dcp import logger as our_logger
from shardkeep.dcp import logging_handlers, state_dict_loader, state_dict_saver
from shardkeep.dcp._impl.driver import _dcp_logger, _init_logger
from shardkeep.dcp.api import CheckpointException


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def messages(self):
        return [record.msg for record in self.records]


@contextlib.contextmanager
def listening(handler=None):
    handler = handler or Heard()
    _dcp_logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield handler
    finally:
        _dcp_logger.removeHandler(handler)


class Bad(torchs.FileSystemReader):
    def read_data(self, plan, planner):
        raise OSError("no such luck")


def shape(records):
    """What is the same in each run: who, what happened, how loud, and which fields it has."""
    return [
        (each.msg["func_name"], each.msg["event"], each.levelname, sorted(each.msg), each.msg.get("checkpoint_id"))
        for each in records
    ]


def use(saver, loader, place):
    state = {"w": torch.ones(3), "n": 1}
    saver.save(state, checkpoint_id=place, storage_writer=torchs.FileSystemWriter(place))
    loader.load(state, storage_reader=torchs.FileSystemReader(place))
    with contextlib.suppress(CheckpointException, torchs.CheckpointException):
        loader.load(state, storage_reader=Bad(place), planner=torchs.DefaultLoadPlanner())


def both(place):
    """What torch's calls log, and what ours do; torch's on one list with its last state, as it changes its dicts."""

    class Copies(Heard):
        def emit(self, record):
            record.msg = dict(record.msg)
            super().emit(record)

    with listening(Copies()) as theirs:
        use(torchs.state_dict_saver, torchs.state_dict_loader, place)
    with listening() as ours:
        use(state_dict_saver, state_dict_loader, place)
    return shape(theirs.records), shape(ours.records)


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_messages_are_torchs(rank_pool, tmp_path, ranks):
    """A save, a load and one that fails give the same messages in the same order, with the same fields, on each rank."""
    place = str(tmp_path / "checkpoint")
    for theirs, ours in rank_pool.run(ranks, both, place) if ranks else [both(place)]:
        assert ours == theirs
        assert ("save", "end", "DEBUG") in [each[:3] for each in ours]
        assert ours[-1][:3] == ("load", "exception", "ERROR")
        assert ("global_rank" in ours[0][3]) == bool(ranks)


def test_a_message_says_what_happened(tmp_path):
    """Times, what was spent, who took part, and one id for the messages of one call, each in a dict of its own."""
    with listening() as heard:
        use(state_dict_saver, state_dict_loader, str(tmp_path))
    first, last = [each for each in heard.messages if each["func_name"] == "save"]
    assert (first["event"], last["event"]) == ("start", "end")
    assert first["uuid"] == last["uuid"]
    assert (first["storage_writer"], first["checkpoint_id"]) == ("FileSystemWriter", str(tmp_path))
    assert last["times_spent"] == last["time"] - first["time"] >= 0
    failed = heard.messages[-1]
    assert (failed["event"], failed["planner"]) == ("exception", "DefaultLoadPlanner")
    assert "no such luck" in failed["error"]
    calls = [each["uuid"] for each in heard.messages if each["event"] == "start"]
    assert len(set(calls)) == len(calls)
    assert {each["uuid"] for each in heard.messages} == set(calls)


def test_the_logger_is_torchs():
    """Who listens to torch's logger hears ours; the names of both modules are there."""
    from torch.distributed.checkpoint import logger as their_logger
    from torch.distributed.checkpoint import logging_handlers as their_handlers

    assert our_logger._dcp_logger is their_logger._dcp_logger
    assert our_logger.logger is their_logger.logger
    assert logging_handlers.DCP_LOGGER_NAME == their_handlers.DCP_LOGGER_NAME == "dcp_logger"
    assert not _dcp_logger.propagate


def test_processes_that_only_save_print_their_rank():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        _init_logger(3)
        [added] = [each for each in root.handlers if each not in before]
        assert (root.level, added.level) == (logging.INFO, logging.INFO)
        assert added.format(logging.makeLogRecord({"msg": "hello"})).startswith("[3] ")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
