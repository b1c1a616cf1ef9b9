"""
A call that all ranks make together, phase by phase; a failure on any rank is raised on every rank.

In each phase every rank does its work, rank 0 decides from all contributions, and every rank gets its answer, or all raise the same
error. Ranks communicate only through the key-value store of their world, in plain data. A rank that fails, leaves or dies never
makes the others wait past their deadline, and no key of a call stays behind.

In a phase a rank appends its message to a log that it shares with a few others, and polls one key, which is the same for all
ranks. Rank 0 reads the logs one after the other, so its requests are a small part of the number of ranks. If all ranks get the
same answer, it is in that one key. The keys of a world, where CALL counts the calls of each rank, STEP the phases of a call, and
LOG has the messages of `LOG_RANKS` ranks:

    calls/RANK              how many calls this rank has made
    doing/RANK              what this rank is doing, for the message if it does not answer
    CALL/STEP/in/LOG        the messages of some ranks to rank 0
    CALL/STEP/out           rank 0's reply to all ranks; deleted when all of them have gone on
    CALL/STEP/own/RANK      a message that is too long for a log, then rank 0's answer to this rank, if the answers differ
    CALL/STEP/all/N         a long answer that several ranks share, and how many have read it
    CALL/STEP/late          how many ranks have read that rank 0 had stopped waiting for them; the last deletes the reply
    CALL/parted             how many ranks have left the call; the last deletes the last reply, which rank 0 waits for, because
                            its process may host the store
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from shardkeep.dist import rank_errors
from shardkeep.dist.kv import BATCH, PIECE_BYTES, KVMailbox, StoreUnreachable, longest_pause_s, run_aside, with_mailbox
from shardkeep.dist.rank_errors import ALL_CALL, GroupError
from shardkeep.errors import CheckpointError, Failure
from shardkeep.options import per_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkeep.dist.world import Decide, World


class RankActivity(msgspec.Struct, frozen=True, array_like=True):
    """What a rank did last, for messages about a rank that does not answer."""

    call: int
    step: int
    phase: str
    title: str


class RankMessage(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    phase: str
    payload: bytes = b""
    failure: Failure | None = None
    left: bool = False
    """It will not read the answer."""
    gave_up: bool = False
    """It has stopped waiting for rank 0."""


class CoordinatorReply(msgspec.Struct, frozen=True, kw_only=True):
    body: bytes = b""
    """The answer, the same for all ranks."""
    own: bool = False
    """Each rank has an answer of its own instead, an `OwnAnswer`."""
    failed: bool = False
    """The body is a `GroupError`."""
    missed: list[int] = []
    """Ranks for which rank 0 had stopped waiting, and which may read this later."""
    present: int = 0
    """How many ranks are expected to read their answer."""


class OwnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    body: bytes = b""
    shared: str = ""
    """Key of the body, if several ranks share it."""
    readers: int = 0
    """How many ranks read that key; the last deletes it."""


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(RankMessage).decode
decode_reply = msgspec.msgpack.Decoder(CoordinatorReply).decode
decode_own = msgspec.msgpack.Decoder(OwnAnswer).decode
decode_group_error = msgspec.msgpack.Decoder(GroupError).decode
decode_activity = msgspec.msgpack.Decoder(RankActivity).decode


T = TypeVar("T")

log = logging.getLogger("shardkeep")

LINGER_S = 5.0
"""How long rank 0 waits at the end of a call for the others to read its answer, at least."""
SHARED_BYTES = 4096
"""An answer of at least this length that several ranks get is stored once, even if others get another."""
LOG_RANKS = 32
"""How many ranks append their messages to one log."""
LOGGED_BYTES = 4096
"""The longest message in a log, because a TCPStore copies the whole value each time that something is appended."""
NOTE_S = 0.1
"""How long the work of a rank takes before it notes what it does. Rank 0 does so at once, and all do in their first call."""

_last_waits = per_process(dict[str, float])
"""How long this process waited for rank 0 in the last phase of each name."""
_MOST_WAITS = 100

_SAID, _LONG, _LEFT = 0, 1, 2
"""Whether an entry of a log is a message, stands for a long one, or says that the rank left or gave up."""


class _NoAnswer(StoreUnreachable):
    """The store works, but rank 0 does not answer."""


class Rendezvous:
    """One call (a save, a load) that all ranks of a world make together. Used by one thread at a time."""

    def __init__(self, world: World, title: str) -> None:
        self._world = world
        self.alone_s = world.alone_s
        """How much longer than its timeout a rank waits for rank 0's own work."""
        self._title = title
        self._call = 0
        # What rank 0 did last before this call, and so did the others if they made the same calls.
        self._before: RankActivity | None = None
        # The phase in which this rank sends its next message.
        self._step = 0
        self._present = 0
        self._shared_error: BaseException | None = None
        # Set once rank 0 or the store is out of reach; nothing can be agreed on after that.
        self._lost: CheckpointError | None = None
        # Rank 0 no longer waits for ranks that left (with their failure) or did not answer (with what is known of them).
        self._departed: dict[int, Failure] = {}
        self._silent: dict[int, str] = {}
        self._left = False
        self._cut = False
        # On rank 0: logs that it has read, which are still to be deleted.
        self._stale: list[str] = []
        # Key and length of rank 0's last reply, if those who go on from it are all that read it.
        self._last_out: tuple[str, int] | None = None

    def agree(self, phase: str, work: Callable[[], bytes], decide: Decide) -> bytes:
        """
        Run `work` on every rank, then `decide` on rank 0, and return what was decided for this rank.

        `phase` names this step in messages, the same on all ranks. `decide` gets the contributions in the order of ranks
        and returns one answer for each. If a rank fails, all raise the class of the first failure, with the failures of all in
        `by_rank` (a single rank: its own exception); `RanksSilent` if ranks do not answer or cannot be reached;
        `RanksDisagree` if they are in different calls or phases.
        """
        if self._world.solo:
            return _decided(decide, [work()])[0]
        if self._lost is not None:
            raise self._lost
        try:
            return self._agree(phase, work, decide)
        except Exception:
            raise
        except BaseException as stopped:  # Ctrl-C or exit: the others learn of it now, not at their deadline
            self._leave(stopped)
            raise

    def raises_on_all(self, error: BaseException) -> None:
        """Note that all ranks have been answered with this error, so that none need be notified when it is raised."""
        self._shared_error = error

    def _agree(self, phase: str, work: Callable[[], bytes], decide: Decide) -> bytes:
        message = RankMessage(title=self._title, phase=phase)
        cause: Exception | None = None
        try:
            with self._noted(phase):
                try:
                    message = replace(message, payload=work())
                except Exception as error:  # noqa: BLE001 - every rank raises it, this one with `error` as its cause
                    message, cause = replace(message, failure=rank_errors.describe_error(error)), error
            if self._world.rank == 0:
                answer, cause = self._lead(message, cause, decide)
            else:
                answer = self._follow(message)
        except StoreUnreachable as lost:
            self._lost = self._out_of_reach(message, lost)
            raise self._lost from (cause or lost)
        if isinstance(answer, GroupError):
            self._shared_error = shared = answer.error()
            raise shared from cause
        return answer

    def _lead(
        self, message: RankMessage, cause: Exception | None, decide: Callable[[list[bytes]], list[bytes]]
    ) -> tuple[bytes | GroupError, Exception | None]:
        messages = {0: message, **self._gather()}
        while (missed := self._missed_call(messages)) is not None:
            self._skip_call(messages, missed)
            messages = {0: message, **self._gather()}
        group_error = self._find_error(messages)
        answers: list[bytes] = []
        if group_error is None:
            try:
                answers = _decided(decide, [messages[rank].payload for rank in range(self._world.size)])
            except Exception as error:  # noqa: BLE001 - every rank raises it, this one with `error` as its cause
                cause = error
                group_error = rank_errors.merge_failures(
                    {0: rank_errors.describe_error(error)}, phase=message.phase, title=self._title
                )
        if group_error is not None:
            self._send_error(group_error)
            return group_error, cause
        self._send(dict(enumerate(answers[1:], start=1)), failed=False)
        return answers[0], None

    def _gather(self) -> dict[int, RankMessage]:
        """Collect the messages of the other ranks; note which left and which do not answer."""
        gone = self._departed.keys() | self._silent.keys()
        awaited = {rank for rank in range(1, self._world.size) if rank not in gone}
        timeout_s, step = self._world.timeout_s, self._step
        raw: dict[int, bytes] = {}
        logs = sorted({rank // LOG_RANKS for rank in awaited}, reverse=True)

        def errand(mailbox: KVMailbox) -> dict[int, _LastSeen]:
            def is_missing(log: int) -> bool:
                ranks = range(log * LOG_RANKS, (log + 1) * LOG_RANKS)
                return any(rank in awaited and rank not in raw for rank in ranks)

            def look() -> bool | None:
                while logs:
                    some = logs[-BATCH:]
                    self._read_logs(mailbox, some, raw)
                    logs[-BATCH:] = left = [*filter(is_missing, some)]
                    if left:
                        self._drop_stale(mailbox, BATCH)
                        return None
                return True

            def late(waited_s: float) -> None:
                self._report_absent(mailbox, awaited - raw.keys(), timeout_s, waited_s)

            if not mailbox.poll(look, timeout_s, late):
                for log in logs:
                    self._read_logs(mailbox, [log], raw)
            long = [rank for rank in awaited if raw.get(rank) == b""]
            raw.update(zip(long, mailbox.read([self._key(step, "own", rank) for rank in long]), strict=True))
            return {rank: _last_seen(mailbox, rank) for rank in awaited - raw.keys()}

        # Twice the timeout: once to wait, once to read messages that may be long.
        last_seen = self._visit(errand, within_s=2 * timeout_s)
        if last_seen:
            self._last_out = None  # these ranks may still read it, and delete it
        self._silent |= {rank: self._describe_silence(timeout_s, last_seen[rank]) for rank in sorted(last_seen)}
        messages = {rank: decode_message(raw[rank]) for rank in sorted(awaited & raw.keys())}
        self._departed |= {
            rank: message.failure for rank, message in messages.items() if message.left and message.failure
        }
        return messages

    def _read_logs(self, mailbox: KVMailbox, logs: list[int], messages: dict[int, bytes]) -> None:
        """Add the messages of logs; empty ones stand for long messages."""
        entries = mailbox.entries([self._key(self._step, "in", log) for log in logs])
        # A rank's last word is that it left, wherever it is: a thread of an interrupted rank may still send its message.
        for entry in sorted(entries, key=lambda entry: entry[0] == _LEFT):
            messages[int.from_bytes(entry[1:5], "little")] = entry[5:]

    def _drop_stale(self, mailbox: KVMailbox, most: int | None = None) -> None:
        """Delete logs that were read. Deleting them at once would make all ranks wait."""
        for key in self._stale[:most]:
            mailbox.drop_log(key)
        del self._stale[:most]

    def _find_error(self, messages: dict[int, RankMessage]) -> GroupError | None:
        failures = {rank: message.failure for rank, message in messages.items() if message.failure} | self._departed
        phase = messages[0].phase
        titles = {rank: repr(message.title) for rank, message in messages.items()}
        here = {rank: message for rank, message in messages.items() if not message.left}
        phases = {rank: f"phase {message.phase!r} of {message.title}" for rank, message in here.items()}
        for said in (titles, phases):
            if len(set(said.values())) > 1:
                return rank_errors.merge_disagreement(said, failures, title=self._title)
        if self._silent:
            return rank_errors.merge_silence(self._silent, failures, phase=phase, title=self._title)
        if failures:
            return rank_errors.merge_failures(failures, phase=phase, title=self._title)
        return None

    def _missed_call(self, messages: dict[int, RankMessage]) -> str | None:
        """Return the call that the others waited for and rank 0 never made, if their messages show that."""
        if self._step > 0:
            return None
        given_up = {message.title for message in messages.values() if message.gave_up}
        current = {message.title for message in messages.values() if not message.gave_up}
        return min(given_up) if given_up and current == {self._title} and self._title not in given_up else None

    def _skip_call(self, messages: dict[int, RankMessage], title: str) -> None:
        """Count the missed call as made, or this rank would stay one call behind the others."""
        everyone = {rank: f"did not make the call {title!r}" for rank in messages if not messages[rank].left}
        group_error = rank_errors.merge_silence(everyone, {}, phase="begin", title=title)
        self._silent |= dict.fromkeys(everyone, "")
        self._send_error(group_error)
        self._departed, self._silent = {}, {}
        self._visit(self._number)

    def _send_error(self, group_error: GroupError) -> None:
        body = encode(group_error)
        self._send({rank: body for rank in range(1, self._world.size) if rank not in self._departed}, failed=True)

    def _send(self, answers: dict[int, bytes], *, failed: bool) -> None:
        missed = [rank for rank in answers if rank in self._silent]
        self._present = len(answers) - len(missed)
        own = self._own_answers(answers) if len(set(answers.values())) > 1 else {}
        body = b"" if own or not answers else next(iter(answers.values()))
        reply = CoordinatorReply(body=body, own=bool(own), failed=failed, missed=missed, present=self._present)
        step, read_out, out = self._step, self._last_out, (self._key(self._step, "out"), encode(reply))

        def errand(mailbox: KVMailbox) -> None:
            for letter in (*own.items(), *([out] if answers else [])):
                mailbox.put(*letter)  # the reply last, because ranks read their own answers when they see it
            self._stale += self._logs(step)
            if read_out:
                mailbox.drop(*read_out)
            for key in (self._key(s, "own", rank) for rank in self._departed for s in (step - 1, step)):
                mailbox.discard(key)

        self._visit(errand)
        self._last_out = (out[0], len(out[1])) if answers and not missed else None
        self._step += 1

    def _logs(self, step: int) -> list[str]:
        return [self._key(step, "in", log) for log in range(1 + (self._world.size - 1) // LOG_RANKS)]

    def _own_answers(self, answers: dict[int, bytes]) -> dict[str, bytes]:
        sharers: dict[bytes, list[int]] = {}
        for rank, body in answers.items():
            sharers.setdefault(body, []).append(rank)
        letters: dict[str, bytes] = {}
        for number, (body, ranks) in enumerate(sharers.items()):
            own = OwnAnswer(body=body)
            if len(ranks) > 1 and len(body) >= SHARED_BYTES:
                own = OwnAnswer(shared=self._key(self._step, "all", number), readers=len(ranks))
                letters[own.shared] = body
            letters |= dict.fromkeys((self._key(self._step, "own", rank) for rank in ranks), encode(own))
        return letters

    def _follow(self, message: RankMessage) -> bytes | GroupError:
        reply = self._exchange(message)
        while self._missed(reply) and self._step == 1 and decode_group_error(reply.body).title != self._title:
            # Rank 0 gave up on a call that this rank never made. Count it as made, and answer in the next one.
            self._visit(self._number)
            reply = self._exchange(message)
        self._present = 0 if self._missed(reply) else reply.present
        return decode_group_error(reply.body) if reply.failed else reply.body

    def _missed(self, reply: CoordinatorReply) -> bool:
        return self._world.rank in reply.missed

    def _exchange(self, message: RankMessage) -> CoordinatorReply:
        body, step = encode(message), self._step
        log, answer = self._key(step, "in", self._world.rank // LOG_RANKS), self._key(step, "out")
        own, long_nbytes = self._key(step, "own", self._world.rank), len(body) if len(body) > LOGGED_BYTES else 0
        timeout_s = 2 * self._world.timeout_s + self.alone_s

        def errand(mailbox: KVMailbox) -> CoordinatorReply | _LastSeen:
            began = time.monotonic()
            if long_nbytes:
                mailbox.put(own, body)
            self._append(mailbox, log, _LONG if long_nbytes else _SAID, b"" if long_nbytes else body)
            self._step = step + 1
            raw = mailbox.poll(
                lambda: mailbox.peek(answer),
                timeout_s - (time.monotonic() - began),
                partial(self._report_absent, mailbox, {0}, timeout_s),
                # A wait mostly takes as long as the last one of its kind, and until then looks only disturb those that work.
                pause_s=max(mailbox.answer_s(long_nbytes), _last_waits().get(message.phase, 0.0) * 3 / 4),
                longest_pause_s=self._longest_pause_s(),
            )
            if len(waits := _last_waits()) >= _MOST_WAITS:  # phases with numbers in their names
                waits.clear()
            waits[message.phase] = time.monotonic() - began
            if raw is None:
                failure = Failure("RanksSilent", f"waited {timeout_s:g} s for rank 0 and gave up")
                last_word = replace(message, payload=b"", failure=failure, left=True, gave_up=True)
                self._append(mailbox, log, _LEFT, encode(last_word))
                return _last_seen(mailbox, 0)
            reply = decode_reply(raw)
            self._last_out = None if reply.missed else (answer, len(raw))
            if self._missed(reply):  # rank 0 reads and deletes nothing of this rank any more
                mailbox.drop_log(log)
                self._drop_late(mailbox, step, reply, len(raw))
            if reply.own:
                reply = replace(reply, body=self._own_answer(mailbox, own))
            if long_nbytes > (PIECE_BYTES if reply.own else 0):
                mailbox.drop(own, long_nbytes)
            return reply

        reply = self._visit(errand, within_s=timeout_s)
        if not isinstance(reply, CoordinatorReply):
            raise _NoAnswer(self._describe_silence(timeout_s, reply))
        return reply

    def _append(self, mailbox: KVMailbox, log: str, kind: int, body: bytes) -> None:
        mailbox.append(log, bytes([kind]) + self._world.rank.to_bytes(4, "little") + body)

    def _own_answer(self, mailbox: KVMailbox, key: str) -> bytes:
        raw = mailbox.peek(key) or b""
        mailbox.drop(key, len(raw))
        own = decode_own(raw)
        if not own.shared:
            return own.body
        [body] = mailbox.read([own.shared])
        if mailbox.count(f"{own.shared}/read") == own.readers:
            mailbox.drop(own.shared, len(body))
            mailbox.drop(f"{own.shared}/read")
        return body

    def _drop_late(self, mailbox: KVMailbox, step: int, reply: CoordinatorReply, nbytes: int) -> None:
        """Delete a reply that late ranks read after the others, and the one before it, if this is the last of them."""
        if mailbox.count(self._key(step, "late")) == len(reply.missed):
            mailbox.drop(self._key(step, "late"))
            mailbox.drop(self._key(step, "out"), nbytes)
            mailbox.discard(self._key(step - 1, "out"))

    def _number(self, mailbox: KVMailbox) -> None:
        self._call = mailbox.count(f"calls/{self._world.rank}")
        self._step = 0
        if self._world.rank == 0:
            self._before = _last_note(mailbox, 0)

    @contextlib.contextmanager
    def _noted(self, phase: str) -> Iterator[None]:
        """Note what this rank does, for the others' message if it does not answer."""
        if self._call == 1 or self._world.rank == 0:
            self._visit(lambda mailbox: self._note(mailbox, phase))
            yield
            return
        done = threading.Event()

        def note_late() -> None:
            if not done.wait(NOTE_S):
                self._visit(lambda mailbox: self._note(mailbox, phase))

        # Short phases are most of a job's meetings, and a note of each would be a quarter of all requests.
        run_aside(note_late)  # if it fails, this rank's own requests find that out
        try:
            yield
        finally:
            done.set()

    def _note(self, mailbox: KVMailbox, phase: str) -> None:
        mailbox.put(f"doing/{self._world.rank}", encode(RankActivity(self._call, self._step, phase, self._title)))

    def _leave(self, error: BaseException) -> None:
        """Notify the others that this rank leaves the call, unless they know of `error` already."""
        if self._left or self._cut or _comes_from(error, self._shared_error):
            return
        self._left = True
        failure = rank_errors.describe_error(error)
        with contextlib.suppress(StoreUnreachable):
            if self._world.rank == 0:
                self._last_out = None  # perhaps not all have read it
                self._send_error(rank_errors.merge_failures({0: failure}, phase="leave", title=self._title))
            else:
                log = self._key(self._step, "in", self._world.rank // LOG_RANKS)
                message = encode(RankMessage(title=self._title, phase="leave", failure=failure, left=True))
                self._visit(lambda mailbox: self._append(mailbox, log, _LEFT, message))
        if self._world.rank > 0 or not isinstance(error, Exception):
            self._present = 0

    def _part(self) -> None:
        """End the call: rank 0 waits until the others have its answer, because the store may end with its process."""
        if (self._present == 0 and not self._stale) or self._cut:
            return

        # Longer than the others may pause between two looks at the store, but at most half the timeout, because in the next
        # call the others wait for this and for rank 0's own timeout.
        linger_s = min(LINGER_S + 2 * self._longest_pause_s(), self._world.timeout_s / 2)
        parted, present, out = f"{self._call}/parted", self._present, self._last_out

        def errand(mailbox: KVMailbox) -> None:
            self._drop_stale(mailbox)
            if self._world.rank > 0:
                if mailbox.count(parted) == present and out:
                    mailbox.drop(parted)
                    mailbox.discard(self._key(self._step - 2, "out"))  # if rank 0 left before it heard from all
                    mailbox.drop(*out)
            elif present == 0:
                return
            elif out:
                mailbox.poll(lambda: not mailbox.there(out[0]) or None, linger_s)
            elif mailbox.poll(lambda: mailbox.counted(parted) == present or None, linger_s):
                mailbox.drop(parted)
            if self._left:  # the others sent what rank 0 did not wait for
                self._stale += self._logs(self._step - 1)
                self._drop_stale(mailbox)

        # What was agreed on is valid, even if the store is unreachable now.
        with contextlib.suppress(StoreUnreachable):
            self._visit(errand, within_s=linger_s)

    def _longest_pause_s(self) -> float:
        """Return how long a rank pauses between two looks for rank 0's reply, at most."""
        return min(longest_pause_s(self._world.size), self._world.timeout_s / 4)

    def _out_of_reach(self, message: RankMessage, lost: StoreUnreachable) -> CheckpointError:
        self._cut = not isinstance(lost, _NoAnswer)
        text = f"cannot be reached: {lost}" if self._cut else str(lost)
        others = range(1, self._world.size) if self._world.rank == 0 else [0]
        own = {self._world.rank: message.failure} if message.failure else {}
        silent, hint = dict.fromkeys(others, text), "" if self._cut else ALL_CALL
        return rank_errors.merge_silence(silent, own, phase=message.phase, title=self._title, hint=hint).error()

    def _report_absent(self, mailbox: KVMailbox, awaited: set[int], timeout_s: float, waited_s: float) -> None:
        """Log which ranks have not begun this call, in a long wait for them; those that do their part are not named."""
        if self._step > (self._world.rank > 0):  # in later phases all have
            return
        if absent := [rank for rank in awaited if mailbox.counted(f"calls/{rank}") < self._call]:
            text = "%s: still waiting for %s after %.0f s, this rank gives up after %.0f s: %s"
            log.warning(text, self._title, rank_errors.format_ranks(absent), waited_s, timeout_s, ALL_CALL)

    def _describe_silence(self, waited_s: float, last_seen: _LastSeen) -> str:
        calls, seen = last_seen
        doing = "it has begun this call, but no phase of it"
        if calls == 0:
            doing = "it has made no call yet"
        elif calls != self._call:
            seen = next((each for each in (seen, self._before) if each and each.call == calls), None)
            title = f", {seen.title!r}" if seen else ""
            doing = f"it has not made call {self._call}; its last was call {calls}{title}"
        elif seen and seen.call == self._call:
            doing = f"it was last seen in {seen.phase!r}" if seen.title == self._title else f"it is in {seen.title!r}"
        return f"did not answer within {waited_s:g} s; {doing}"

    def _key(self, step: int, what: str, number: int | None = None) -> str:
        return f"{self._call}/{step}/{what}" if number is None else f"{self._call}/{step}/{what}/{number}"

    def _visit(self, errand: Callable[[KVMailbox], T], within_s: float | None = None) -> T:
        store = self._world.store
        if store is None:  # unreachable: a world of several ranks has a store
            raise StoreUnreachable("there is no store")
        # A rank that leaves, perhaps because of Ctrl-C, does not wait long for the store.
        timeout_s = min(1.0, self._world.timeout_s) if self._left else self._world.timeout_s
        waiting = 1 if self._world.rank == 0 else self._world.size  # rank 0 waits alone, and the others wait for it
        return with_mailbox(store, waiting, errand, within_s=timeout_s if within_s is None else within_s)


@contextlib.contextmanager
def rendezvous(world: World, title: str) -> Iterator[Rendezvous]:
    """
    Begin a call that all ranks of `world` make together, and end it together.

    A rank that leaves by an exception notifies the others, so that they do not wait for it. Ranks must make their calls in the same
    order; calls are compared by their `title` ("save to runs/a/step-10"). A rank that missed a call catches up in the next
    one, if the titles differ. Raises `RanksSilent` if the store the ranks talk through cannot be reached.
    """
    call = Rendezvous(world, title)
    if world.solo:
        yield call
        return
    try:
        call._visit(call._number)
    except StoreUnreachable as lost:
        raise call._out_of_reach(RankMessage(title=title, phase="begin"), lost) from lost
    try:
        yield call
    except BaseException as error:
        call._leave(error)
        raise
    finally:
        call._part()


_LastSeen = tuple[int, RankActivity | None]
"""How many calls a rank has made, and its last note."""


def _last_seen(mailbox: KVMailbox, rank: int) -> _LastSeen:
    return mailbox.counted(f"calls/{rank}"), _last_note(mailbox, rank)


def _last_note(mailbox: KVMailbox, rank: int) -> RankActivity | None:
    note = mailbox.peek(f"doing/{rank}")
    return decode_activity(note) if note else None


def _decided(decide: Decide, payloads: list[bytes]) -> list[bytes]:
    answers = decide(payloads)
    if len(answers) != len(payloads):
        raise ValueError(f"{len(answers)} answers were decided on for {len(payloads)} ranks")
    return answers


def _comes_from(error: BaseException | None, origin: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and origin is not None and id(error) not in seen:
        if error is origin:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
