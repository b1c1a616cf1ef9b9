"""
The training process's hold on the process that saves: started when needed, watched, replaced when it has died.
"""

from __future__ import annotations

import multiprocessing.connection
import pickle
import signal
from typing import Any, Final

from shardkeep.compat.parcels import Parcel
from shardkeep.compat.saver_process import Answer, Order, Place, serve
from shardkeep.errors import CheckpointError
from shardkeep.protocol.problems import BrokenProtocol

_HOW_TO_START: Final = (
    'start training under `if __name__ == "__main__":` and not in a daemonic process, or save with '
    "AsyncCheckpointerType.THREAD"
)


class SaverDied(CheckpointError, RuntimeError):
    """The process that saves ended before its work was done."""


class FromSaver(CheckpointError):
    """Where in the process that saves an exception was raised, as text."""


class SaverProcess:
    """A process that saves, spawned with a copy of nothing. Started on any thread, then used by one at a time."""

    def __init__(self, world: Place | None) -> None:
        """
        Start the process.

        Args:
            world: Which rank it is; None where there are no others.

        Raises:
            SaverDied: it could not be started.

        """
        # torch's, whose pipes carry tensors as handles to shared memory
        import torch.multiprocessing  # noqa: PLC0415 - most saves need none of this

        self.world = world
        self._ready = False
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, world), daemon=True, name="shardkeep-saver")
        try:
            self._process.start()
        except (AssertionError, RuntimeError, OSError) as error:
            raise SaverDied(
                f"the process that saves could not be started: {error}",
                hint=_HOW_TO_START,
            ) from error
        finally:
            theirs.close()  # so that the pipe ends with the process

    def wait_until_ready(self, timeout_s: float) -> None:
        """
        Wait until the process can work.

        Raises:
            SaverDied: it ended, or took too long.

        """
        if not self._ready:
            self._answer("start", timeout_s)
            self._ready = True

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return self._process.pid

    def alive(self) -> bool:
        """Say whether the process is there; may be asked by any thread."""
        return not multiprocessing.connection.wait([self._process.sentinel], 0)

    def ask(self, step: str, argument: Any = None) -> Any:
        """
        Have a step carried out, and return what it returned.

        Raises:
            SaverDied: the process ended; told as soon as it happens.
            BaseException: what the step raised there.

        """
        try:
            parcel = Parcel((step, argument))
        except Exception as error:
            raise BrokenProtocol(
                f"a save cannot be sent to the process that saves: {error}",
                hint="the state, the storage writer and the planner are pickled; or use AsyncCheckpointerType.THREAD",
            ) from error
        try:
            parcel.send(self._pipe)
        except OSError as error:
            raise self._died(step) from error
        return self._answer(step, None)

    def close(self) -> None:
        """End the process, at once if it does not end by itself."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(5)

    def _answer(self, step: str, timeout_s: float | None) -> Any:
        ready = multiprocessing.connection.wait([self._pipe, self._process.sentinel], timeout_s)
        if not ready:
            self._process.terminate()
            raise SaverDied(f"the process that saves did not answer within {timeout_s:g} s, in step {step!r}")
        try:
            if not self._pipe.poll():
                raise self._died(step)
            answer: Answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died(step) from error
        if answer.error is not None:
            raise answer.error from FromSaver(answer.trace)
        return answer.value

    def _died(self, step: str) -> SaverDied:
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()  # half a message is no way to go on
            self._process.join(5)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        return SaverDied(
            f"the process that saves (pid {self.pid}) {how} in step {step!r}",
            hint=_HOW_TO_START if step == "start" else "the next save starts a new one; was there too little memory?",
        )


class RemoteSave:
    """The steps of a save that another process makes; what passes between them is bytes."""

    def __init__(self, saver: SaverProcess, order: Order) -> None:
        self._saver = saver
        self._order = order

    def plan(self) -> bytes:
        """Begin, and return this rank's plan."""
        self._saver.ask("begin", self._order)
        plan: bytes = self._saver.ask("plan")
        return plan

    def decide(self, plans: list[bytes]) -> list[bytes]:
        """Return the plan of each rank."""
        decided: list[bytes] = self._saver.ask("decide", plans)
        return decided

    def write(self, plan: bytes) -> bytes:
        """Carry out a plan."""
        written: bytes = self._saver.ask("write", plan)
        return written

    def finish(self, results: list[bytes]) -> bytes:
        """Complete the checkpoint, and return its metadata."""
        finished: bytes = self._saver.ask("finish", results)
        return finished

    def discard(self) -> None:
        """Have what was written of a failed save removed, if the process still lives."""
        if self._saver.alive():
            self._saver.ask("discard")

    def forget(self) -> None:
        """Let the process drop the state, if it still lives."""
        if self._saver.alive():
            self._saver.ask("forget")
