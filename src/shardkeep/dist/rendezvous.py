"""
A call that all ranks make together, phase by phase; a failure on any rank is raised on every rank.

In each phase every rank does its work, rank 0 decides from all contributions, and every rank gets its answer, or all raise the same
error. Ranks communicate only through the key-value store of their world, in plain data. A rank that fails, leaves or dies never
makes the others wait past their deadline, and each key of a call is deleted by its reader.

The keys of a world, where CALL counts the calls of each rank and STEP the phases of a call:

    calls/RANK              how many calls this rank has made
    doing/RANK              what this rank is doing, for the message if it does not answer
    CALL/STEP/in/RANK       this rank's message to rank 0
    CALL/STEP/out/RANK      rank 0's reply to this rank
    CALL/STEP/all/N         a long answer that several ranks share, and how many have read it
    CALL/parted, CALL/over  let rank 0, whose process may host the store, leave last
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from shardkeep.dist.kv import CHECKS_PER_S, KVMailbox, StoreUnreachable, with_mailbox
from shardkeep.dist.rank_errors import (
    ALL_CALL,
    GroupError,
    describe_error,
    format_ranks,
    merge_disagreement,
    merge_failures,
    merge_silence,
)
from shardkeep.errors import CheckpointError, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkeep.dist.world import World


class RankActivity(msgspec.Struct, frozen=True, array_like=True):
    """What a rank did last, for messages about a rank that does not answer."""

    call: int
    step: int
    phase: str
    title: str


class RankMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a rank to rank 0 in a phase."""

    title: str
    phase: str
    payload: bytes = b""
    failure: Failure | None = None
    left: bool = False
    """It will not read the answer."""
    gave_up: bool = False
    """It has stopped waiting for rank 0."""


class CoordinatorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's reply to a rank."""

    body: bytes = b""
    failed: bool = False
    """The body is a `GroupError`."""
    missed: bool = False
    """Rank 0 had stopped waiting for this rank."""
    shared: str = ""
    """Key of the body, if several ranks share it."""
    readers: int = 0
    """How many ranks read that key; the last deletes it."""
    present: int = 0
    """How many ranks are expected to read their answer."""


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(RankMessage).decode
decode_reply = msgspec.msgpack.Decoder(CoordinatorReply).decode
decode_group_error = msgspec.msgpack.Decoder(GroupError).decode
decode_activity = msgspec.msgpack.Decoder(RankActivity).decode


T = TypeVar("T")

log = logging.getLogger("shardkeep")

LINGER_S = 5.0
"""How long rank 0 waits at the end of a call for the others to read its answer, at least."""
SHARED_BYTES = 4096
"""An answer of at least this length that several ranks get is stored once."""


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
        # The phase in which this rank sends its next message.
        self._step = 0
        # How many ranks are expected to read rank 0's last answer.
        self._present = 0
        # The last error that all ranks raised together.
        self._shared_error: BaseException | None = None
        # Set once rank 0 or the store is out of reach; nothing can be agreed on after that.
        self._lost: CheckpointError | None = None
        # Rank 0 no longer waits for ranks that left (with their failure) or did not answer (with what is known of them).
        self._departed: dict[int, Failure] = {}
        self._silent: dict[int, str] = {}
        self._left = False
        self._cut = False

    def agree(self, phase: str, work: Callable[[], bytes], decide: Callable[[list[bytes]], list[bytes]]) -> bytes:
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

    def _agree(self, phase: str, work: Callable[[], bytes], decide: Callable[[list[bytes]], list[bytes]]) -> bytes:
        message = RankMessage(title=self._title, phase=phase)
        cause: Exception | None = None
        try:
            self._visit(lambda mailbox: self._note(mailbox, phase))
            try:
                message = replace(message, payload=work())
            except Exception as error:  # noqa: BLE001 - every rank raises it, this one with `error` as its cause
                message, cause = replace(message, failure=describe_error(error)), error
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

    # -- rank 0 ------------------------------------------------------------------------------------------------

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
                group_error = merge_failures({0: describe_error(error)}, phase=message.phase, title=self._title)
        if group_error is not None:
            self._send_error(group_error)
            return group_error, cause
        self._send(dict(enumerate(answers[1:], start=1)), failed=False)
        return answers[0], None

    def _gather(self) -> dict[int, RankMessage]:
        """Collect the messages of the other ranks; note which left and which do not answer."""
        gone = self._departed.keys() | self._silent.keys()
        awaited = {rank: self._key("in", rank) for rank in range(1, self._world.size) if rank not in gone}
        timeout_s = self._world.timeout_s

        def errand(mailbox: KVMailbox) -> tuple[dict[int, bytes], dict[int, bytes]]:
            here, late = awaited, partial(self._report_absent, mailbox, awaited, timeout_s)
            if not mailbox.wait(list(awaited.values()), timeout_s, late):
                here = {rank: key for rank, key in awaited.items() if mailbox.there(key)}
            bodies = mailbox.take(list(here.values()))
            doing = {rank: _last_activity(mailbox, rank) for rank in awaited.keys() - here.keys()}
            return dict(zip(here, bodies, strict=True)), doing

        # Twice the timeout: once to wait, once to read messages that may be long.
        said, doing = self._visit(errand, within_s=2 * timeout_s)
        self._silent |= {rank: self._describe_silence(timeout_s, raw) for rank, raw in doing.items()}
        messages = {rank: decode_message(raw) for rank, raw in said.items()}
        self._departed |= {
            rank: message.failure for rank, message in messages.items() if message.left and message.failure
        }
        return messages

    def _find_error(self, messages: dict[int, RankMessage]) -> GroupError | None:
        failures = {rank: message.failure for rank, message in messages.items() if message.failure} | self._departed
        phase = messages[0].phase
        titles = {rank: repr(message.title) for rank, message in messages.items()}
        here = {rank: message for rank, message in messages.items() if not message.left}
        phases = {rank: f"phase {message.phase!r} of {message.title}" for rank, message in here.items()}
        for said in (titles, phases):
            if len(set(said.values())) > 1:
                return merge_disagreement(said, failures, title=self._title)
        if self._silent:
            return merge_silence(self._silent, failures, phase=phase, title=self._title)
        if failures:
            return merge_failures(failures, phase=phase, title=self._title)
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
        group_error = merge_silence(everyone, {}, phase="begin", title=title)
        self._silent |= dict.fromkeys(everyone, "")
        self._send_error(group_error)
        self._departed, self._silent = {}, {}
        self._visit(self._number)

    def _send_error(self, group_error: GroupError) -> None:
        body = encode(group_error)
        self._send({rank: body for rank in range(1, self._world.size) if rank not in self._departed}, failed=True)

    def _send(self, answers: dict[int, bytes], *, failed: bool) -> None:
        sharers: dict[bytes, list[int]] = {}
        for rank, body in answers.items():
            sharers.setdefault(body, []).append(rank)
        self._present = sum(rank not in self._silent for rank in answers)

        letters: list[tuple[str, bytes]] = []
        for number, (body, ranks) in enumerate(sharers.items()):
            reply = CoordinatorReply(body=body, failed=failed, present=self._present)
            if len(ranks) > 1 and len(body) >= SHARED_BYTES:
                shared = self._key("all", number)
                letters.append((shared, body))
                reply = replace(reply, body=b"", shared=shared, readers=len(ranks))
            letters += [(self._key("out", r), encode(replace(reply, missed=r in self._silent))) for r in ranks]

        def errand(mailbox: KVMailbox) -> None:
            for key, letter in letters:
                mailbox.put(key, letter)

        self._visit(errand)
        self._step += 1

    # -- the other ranks ---------------------------------------------------------------------------------------

    def _follow(self, message: RankMessage) -> bytes | GroupError:
        reply = self._exchange(message)
        while reply.missed and self._step == 1 and decode_group_error(reply.body).title != self._title:
            # Rank 0 gave up on a call that this rank never made. Count it as made, and answer in the next one.
            self._visit(self._number)
            reply = self._exchange(message)
        self._present = 0 if reply.missed else reply.present
        return decode_group_error(reply.body) if reply.failed else reply.body

    def _exchange(self, message: RankMessage) -> CoordinatorReply:
        body = encode(message)
        mine, answer = self._key("in", self._world.rank), self._key("out", self._world.rank)
        timeout_s = 2 * self._world.timeout_s + self.alone_s
        self._visit(lambda mailbox: mailbox.put(mine, body))
        self._step += 1

        def errand(mailbox: KVMailbox) -> CoordinatorReply | bytes:
            if not mailbox.wait([answer], timeout_s, partial(self._report_absent, mailbox, {0: answer}, timeout_s)):
                failure = Failure("RanksSilent", f"waited {timeout_s:g} s for rank 0 and gave up")
                mailbox.put(mine, encode(replace(message, payload=b"", failure=failure, left=True, gave_up=True)))
                return _last_activity(mailbox, 0)
            return self._receive(mailbox, answer, unread=(mine, len(body)))

        reply = self._visit(errand, within_s=timeout_s)
        if isinstance(reply, bytes):
            raise _NoAnswer(self._describe_silence(timeout_s, reply))
        return reply

    def _receive(self, mailbox: KVMailbox, answer: str, *, unread: tuple[str, int]) -> CoordinatorReply:
        reply = decode_reply(mailbox.take([answer])[0])
        if reply.missed:  # no other rank deletes this rank's message
            mailbox.drop(*unread)
        if not reply.shared:
            return reply
        [body] = mailbox.read([reply.shared])
        if mailbox.count(f"{reply.shared}/read") == reply.readers:
            mailbox.drop(reply.shared, len(body))
            mailbox.drop(f"{reply.shared}/read")
        return replace(reply, body=body)

    # -- all ranks ---------------------------------------------------------------------------------------------

    def _number(self, mailbox: KVMailbox) -> None:
        self._call = mailbox.count(f"calls/{self._world.rank}")
        self._step = 0
        self._note(mailbox, "")

    def _note(self, mailbox: KVMailbox, phase: str) -> None:
        mailbox.put(f"doing/{self._world.rank}", encode(RankActivity(self._call, self._step, phase, self._title)))

    def _leave(self, error: BaseException) -> None:
        """Notify the others that this rank leaves the call, unless they know of `error` already."""
        if self._left or self._cut or _comes_from(error, self._shared_error):
            return
        self._left = True
        failure = describe_error(error)
        with contextlib.suppress(StoreUnreachable):
            if self._world.rank == 0:
                self._send_error(merge_failures({0: failure}, phase="leave", title=self._title))
            else:
                key = self._key("in", self._world.rank)
                message = encode(RankMessage(title=self._title, phase="leave", failure=failure, left=True))
                self._visit(lambda mailbox: mailbox.put(key, message))
        if self._world.rank > 0 or not isinstance(error, Exception):
            self._present = 0

    def _part(self) -> None:
        """End the call: rank 0 waits until the others have its answer, because the store may end with its process."""
        if self._present == 0 or self._cut:
            return

        # Longer than the others may pause between two looks at the store, which grows with their number.
        linger_s = LINGER_S + 2 * self._world.size / CHECKS_PER_S

        def errand(mailbox: KVMailbox) -> None:
            over, parted = f"{self._call}/over", f"{self._call}/parted"
            if self._world.rank > 0:
                if mailbox.count(parted) == self._present:
                    mailbox.put(over, b"")
            # At most half the timeout: in the next call, the others wait for this and for rank 0's own timeout.
            elif mailbox.wait([over], min(linger_s, self._world.timeout_s / 2)):
                mailbox.drop(over)
                mailbox.drop(parted)

        # What was agreed on is valid, even if the store is unreachable now.
        with contextlib.suppress(StoreUnreachable):
            self._visit(errand, within_s=linger_s)

    def _out_of_reach(self, message: RankMessage, lost: StoreUnreachable) -> CheckpointError:
        """Make the error of a rank that can no longer reach the others."""
        self._cut = not isinstance(lost, _NoAnswer)
        text = f"cannot be reached: {lost}" if self._cut else str(lost)
        others = range(1, self._world.size) if self._world.rank == 0 else [0]
        own = {self._world.rank: message.failure} if message.failure else {}
        silent, hint = dict.fromkeys(others, text), "" if self._cut else ALL_CALL
        return merge_silence(silent, own, phase=message.phase, title=self._title, hint=hint).error()

    def _report_absent(self, mailbox: KVMailbox, awaited: dict[int, str], timeout_s: float, waited_s: float) -> None:
        """Log which ranks have not begun this call, in a long wait for them; those that do their part are not named."""
        if self._step > (self._world.rank > 0):  # in later phases all have
            return
        late = [rank for rank, key in awaited.items() if not mailbox.there(key)]
        notes = {rank: _last_activity(mailbox, rank) for rank in late}
        if absent := [rank for rank, note in notes.items() if not note or decode_activity(note).call < self._call]:
            text = "%s: still waiting for %s after %.0f s, this rank gives up after %.0f s: %s"
            log.warning(text, self._title, format_ranks(absent), waited_s, timeout_s, ALL_CALL)

    def _describe_silence(self, waited_s: float, note: bytes) -> str:
        """Describe a rank that does not answer by its last note, an encoded `RankActivity` or nothing."""
        seen = decode_activity(note) if note else None
        doing = "it has begun this call, but no phase of it"
        if seen is None:
            doing = "it has made no call yet"
        elif seen.call != self._call:
            doing = f"it has not made call {self._call}; its last was call {seen.call}, {seen.title!r}"
        elif seen.title != self._title:
            doing = f"it is in {seen.title!r}"
        elif seen.phase:
            doing = f"it was last seen in {seen.phase!r}"
        return f"did not answer within {waited_s:g} s; {doing}"

    def _key(self, way: str, number: int) -> str:
        return f"{self._call}/{self._step}/{way}/{number}"

    def _visit(self, errand: Callable[[KVMailbox], T], within_s: float | None = None) -> T:
        store, size = self._world.store, self._world.size
        if store is None:  # unreachable: a world of several ranks has a store
            raise StoreUnreachable("there is no store")
        # A rank that leaves, perhaps because of Ctrl-C, does not wait long for the store.
        timeout_s = min(1.0, self._world.timeout_s) if self._left else self._world.timeout_s
        return with_mailbox(store, size, errand, within_s=timeout_s if within_s is None else within_s)


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


def _last_activity(mailbox: KVMailbox, rank: int) -> bytes:
    key = f"doing/{rank}"
    return mailbox.read([key])[0] if mailbox.there(key) else b""


def _decided(decide: Callable[[list[bytes]], list[bytes]], payloads: list[bytes]) -> list[bytes]:
    answers = decide(payloads)
    if len(answers) != len(payloads):
        raise ValueError(f"{len(answers)} answers were decided on for {len(payloads)} ranks")
    return answers


def _comes_from(error: BaseException | None, origin: BaseException | None) -> bool:
    """Return whether `error` is `origin`, or was raised because of it."""
    seen: set[int] = set()
    while error is not None and origin is not None and id(error) not in seen:
        if error is origin:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
