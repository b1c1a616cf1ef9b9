"""What asks for a save but the number of a step: time, signals, a file in the root, a call."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from concurrent.futures import Future

from shardkeep.errors import BlobNotFound, CheckpointError, StateError
from shardkeep.manage.aside import Lane
from shardkeep.manage.schedule import Flag, Timer
from shardkeep.store.protocol import Store, is_name, is_sequential

log = logging.getLogger("shardkeep")

SAVE, STOP = "save", "stop"
KINDS = (SAVE, STOP)
_OURS = re.compile(r"lease.*|latest|pin\..*")
"""Files of a root that are not to be deleted because they are there."""
_QUIET_S = 5.0
"""A signal that is sent to all ranks reaches some of them later: within this time it is one and the same."""


class Requests:
    """What was asked for on this rank; on rank 0 also what the others pass on."""

    def __init__(
        self, root: Store, file: str | None, timer: Timer, *, clock: Callable[[], float], interval_s: float
    ) -> None:
        """
        Begin to listen.

        Args:
            root: where the file would be.
            file: what the blob is called that asks for a save.
            timer: when the time has come.
            clock: never jumps.
            interval_s: how often to look for the file.

        """
        if file is not None and (not is_name(file) or _OURS.fullmatch(file)):
            hint = "give the name of a file in the root that is not used for something else, or None"
            raise StateError(f"request_file={file!r}", hint=hint)
        self.save = Flag()
        self.stop = Flag()
        self.timer = timer
        self._root = root
        self._file = file
        self._clock = clock
        self._interval_s = interval_s
        self._looked_s = clock() - interval_s
        self._stuck = False
        # Training must not wait for a service that does not answer; a disk is asked at once.
        self._lane = Lane("shardkeep-requests") if is_sequential(root) else None
        self._look: Future[bool] | None = None
        # The last one that was served: whether it came to this rank, and when.
        self._signal: tuple[bool, float] | None = None
        self._stop_later = False

    def stop_later(self) -> None:
        """Serve a signal again, as the save that it asked for has failed."""
        self._stop_later = True

    def take(self) -> list[str]:
        """Return what was asked for on this rank, to be passed on to rank 0."""
        return [kind for kind, flag in ((SAVE, self.save), (STOP, self.stop)) if flag.take()]

    def why(self, asked: Collection[str]) -> tuple[str, bool]:
        """On rank 0: say why to save now (nothing: do not), and whether a signal asked for it."""
        if self._signalled(asked):
            return "a signal came", True
        if self.save.take() or SAVE in asked:
            return "it was asked for", False
        if self._file_found():
            return f"{self._file} was there", False
        return ("the time has come", False) if self.timer.due() else ("", False)

    def _signalled(self, asked: Collection[str]) -> bool:
        again, self._stop_later = self._stop_later, False
        if again:
            self._signal = None
        own = self.stop.take() or again
        if not own and STOP not in asked:
            return False
        now = self._clock()
        if self._signal is not None and now - self._signal[1] < _QUIET_S and not (own and self._signal[0]):
            return False  # the same, which reached another rank later; only this rank can tell a second one of its own
        self._signal = own, now
        return True

    def _file_found(self) -> bool:
        """Look for the file, in the background where that may take long: then this is what was seen the last time."""
        if self._look is not None:
            if not self._look.done():
                return False
            look, self._look = self._look, None
            if look.result():
                return True
        if self._file is None or self._clock() - self._looked_s < self._interval_s:
            return False
        self._looked_s = self._clock()
        if self._lane is None:
            return self._taken(self._file)
        self._look = self._lane.submit(self._taken, self._file)
        return False

    def _taken(self, file: str) -> bool:
        """Look for the file, and take it away."""
        try:
            self._root.open(file).close()
        except BlobNotFound:
            self._stuck = False
            return False
        except CheckpointError as error:
            log.warning("cannot look for %s in %s: %s", file, self._root.url, error)
            return False
        if self._stuck:  # it was served, and cannot be deleted
            return False
        try:
            self._root.delete(file)
        except CheckpointError as error:
            self._stuck = True
            log.warning("%s asks for no more saves until somebody deletes it: %s", file, error)
        return True
