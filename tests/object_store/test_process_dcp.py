"""Torch's calls with a process of their own, on a real S3 server."""

from __future__ import annotations

import pytest
import torch

from shardkeep import dcp
from shardkeep.dcp._impl.async_ import group_saves_of
from shardkeep.dcp.state_dict_saver import AsyncCheckpointerType
from tests.dcp.sides import quietly
from tests.support.s3_server import S3Server


def end_saver() -> None:
    """End the process, if there is one: another has the variables that are set now."""
    saver = group_saves_of(None, no_dist=True).saver
    if saver is not None:
        saver.close()


def test_a_state_in_torchs_layout(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Saved by a URL in a process of its own, and changed right after the call, it is loaded bit for bit.
    """
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    where = s3_server.url("tests/process-dcp")
    state, found = {"w": torch.arange(1_000_003.0), "step": 3}, {"w": torch.zeros(1_000_003), "step": 0}
    end_saver()
    saved = quietly(
        dcp.async_save, state, checkpoint_id=where, async_checkpointer_type=AsyncCheckpointerType.PROCESS, no_dist=True
    )
    state["w"].zero_()
    saved.result(120)
    end_saver()
    quietly(dcp.load, found, checkpoint_id=where, no_dist=True)
    assert torch.equal(found["w"], torch.arange(1_000_003.0))
    assert found["step"] == 3
