"""
One step on all ranks, whose every failure comes back to every rank.

In comes a `World` and, for each phase of a call, the work of this rank; out comes the answer rank 0 decided on for
this rank, or one error that is the same on all ranks. Ranks talk only through the world's store, in plain data: a
rank that fails, leaves or dies never leaves the others waiting past their deadline, and each key that is written for
a call is deleted by whoever reads it.

The keys of a world, where `call` counts the calls of each rank and `step` the phases of a call:

    calls/RANK              how many calls this rank has made
    doing/RANK              what this rank is doing, for the message when it is silent
    CALL/STEP/in/RANK       what this rank says to rank 0
    CALL/STEP/out/RANK      what rank 0 says to this rank
    CALL/STEP/all/N         a long answer that several ranks share, and who has read it
    CALL/parted, CALL/over  so that rank 0, whose process may host the store, is the last to go
"""

from __future__ import annotations

import msgspec
from shardkeep.errors import Failure
from shardkeep.dist.rank_errors import GroupError
import contextlib
from typing import TYPE_CHECKING, TypeVar
from msgspec.structs import replace
from shardkeep.errors import CheckpointError, Failure
from shardkeep.dist.kv import KVMailbox, StoreUnreachable, with_mailbox
from shardkeep.dist.rank_errors import (
    GroupError,
    describe_error,
    merge_disagreement,
    merge_failures,
    merge_silence,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from shardkeep.dist.world import World


# What ranks write to each other in a phase, and how it looks on the wire: msgpack, checked when it is read.


class RankActivity(msgspec.Struct, frozen=True, array_like=True):
    """What a rank did last, in case it is never heard of again."""

    call: int
    step: int
    phase: str
    title: str


class RankMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says to rank 0 in a phase."""

    title: str
    phase: str
    payload: bytes = b""
    failure: Failure | None = None
    left: bool = False
    """It will not read the answer."""
    gave_up: bool = False
    """It waited for rank 0 and rank 0 did not come."""


class CoordinatorReply(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says to a rank."""

    body: bytes = b""
    failed: bool = False
    """The body is a verdict."""
    missed: bool = False
    """Rank 0 had stopped waiting for this rank."""
    shared: str = ""
    """Key of the body, where it lies elsewhere."""
    readers: int = 0
    """How many ranks read that key; the last deletes it."""
    present: int = 0
    """How many ranks get an answer they are expected to read."""


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(RankMessage).decode
decode_reply = msgspec.msgpack.Decoder(CoordinatorReply).decode
decode_group_error = msgspec.msgpack.Decoder(GroupError).decode
decode_activity = msgspec.msgpack.Decoder(RankActivity).decode


def describe_activity(note: bytes, *, call: int, title: str) -> str:
    """Say what a rank was doing by its last note, an encoded `Doing` or nothing, seen from a rank in this `call`."""
    seen = decode_activity(note) if note else None
    if seen is None:
        return "it has made no call yet"
    if seen.call != call:
        return f"it has not made call {call}; its last was call {seen.call}, {seen.title!r}"
    if seen.title != title:
        return f"it is in {seen.title!r}"
    if seen.phase:
        return f"it was last seen in {seen.phase!r}"
    return "it has begun this call, but no phase of it"


T = TypeVar("T")

LINGER_S = 5.0
"""How long rank 0 stays at the end of a call for the others to read its answer."""
SHARED_BYTES = 4096
"""From this length on, an answer that several ranks get is stored once."""


class _NoAnswer(StoreUnreachable):
    """The store works, but rank 0 says nothing."""


class Rendezvous:
    """One call (a save, a load) that all ranks of a world make together. Used by one thread at a time."""

    def __init__(self, world: World, title: str) -> None:
        self._world = world
        self._title = title
        self._call = 0
        # The phase in which this rank has to speak next.
        self._step = 0
        # How many ranks are expected to read rank 0's last answer.
        self._present = 0
        # The last error that all ranks raised together.
        self._told: CheckpointError | None = None
        # Set once rank 0 or the store is out of reach; nothing can be agreed on after that.
        self._lost: CheckpointError | None = None
        # Rank 0 waits no more for those who left (with their failure) or fell silent (with what is known of them).
        self._departed: dict[int, Failure] = {}
        self._silent: dict[int, str] = {}
        self._left = False
        self._cut = False

    def agree(self, phase: str, work: Callable[[], bytes], decide: Callable[[list[bytes]], list[bytes]]) -> bytes:
        """
        Run `work` on every rank, then `decide` on rank 0, and return what was decided for this rank.

        Args:
            phase: What this step is called in messages; all ranks must give the same.
            work: Makes this rank's contribution.
            decide: Gets the contributions in the order of ranks and returns one answer for each rank.

        Raises:
            CheckpointError: some rank failed. All ranks raise the same, of the class of the first failure, with the
                failures of all in `by_rank`; on a rank that failed, its own exception is the cause. A single rank
                sees its own exceptions as they are.
            RanksSilent: ranks did not answer in time, or cannot be reached.
            RanksDisagree: ranks are in different calls or phases.

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

    def _agree(self, phase: str, work: Callable[[], bytes], decide: Callable[[list[bytes]], list[bytes]]) -> bytes:
        word = RankMessage(title=self._title, phase=phase)
        cause: Exception | None = None
        try:
            self._visit(lambda mailbox: self._note(mailbox, phase))
            word, cause = self._try(word, work)
            if self._world.rank == 0:
                answer, cause = self._lead(word, cause, decide)
            else:
                answer = self._follow(word)
        except StoreUnreachable as lost:
            self._lost = self._out_of_reach(word, lost)
            raise self._lost from (cause or lost)
        if isinstance(answer, GroupError):
            self._told = answer.error()
            raise self._told from cause
        return answer

    def _try(self, word: RankMessage, work: Callable[[], bytes]) -> tuple[RankMessage, Exception | None]:
        try:
            return replace(word, payload=work()), None
        except Exception as error:  # noqa: BLE001 - every rank raises it, this one with `error` as its cause
            return replace(word, failure=describe_error(error)), error

    # -- rank 0 ------------------------------------------------------------------------------------------------

    def _lead(
        self, word: RankMessage, cause: Exception | None, decide: Callable[[list[bytes]], list[bytes]]
    ) -> tuple[bytes | GroupError, Exception | None]:
        words = {0: word, **self._gather()}
        while (missed := self._missed_call(words)) is not None:
            self._skip_call(words, missed)
            words = {0: word, **self._gather()}
        verdict = self._judge(words)
        answers: list[bytes] = []
        if verdict is None:
            try:
                answers = _decided(decide, [words[rank].payload for rank in range(self._world.size)])
            except Exception as error:  # noqa: BLE001 - every rank raises it, this one with `error` as its cause
                cause = error
                verdict = merge_failures({0: describe_error(error)}, phase=word.phase, title=self._title)
        if verdict is not None:
            self._tell_all(verdict)
            return verdict, cause
        self._send(dict(enumerate(answers[1:], start=1)), failed=False)
        return answers[0], None

    def _gather(self) -> dict[int, RankMessage]:
        """Collect the words of the other ranks; note who left and who is silent."""
        gone = self._departed.keys() | self._silent.keys()
        awaited = {rank: self._key("in", rank) for rank in range(1, self._world.size) if rank not in gone}
        patience_s = self._world.timeout_s

        def errand(mailbox: KVMailbox) -> tuple[dict[int, bytes], dict[int, bytes]]:
            here = awaited
            if not mailbox.wait(list(awaited.values()), patience_s):
                here = {rank: key for rank, key in awaited.items() if mailbox.there(key)}
            bodies = mailbox.take(list(here.values()))
            doing = {rank: _last_note(mailbox, rank) for rank in awaited.keys() - here.keys()}
            return dict(zip(here, bodies, strict=True)), doing

        # Twice the patience: once to wait, once to read what may be long.
        said, doing = self._visit(errand, within_s=2 * patience_s)
        self._silent |= {rank: self._silence(patience_s, raw) for rank, raw in doing.items()}
        words = {rank: decode_message(raw) for rank, raw in said.items()}
        self._departed |= {rank: word.failure for rank, word in words.items() if word.left and word.failure}
        return words

    def _judge(self, words: dict[int, RankMessage]) -> GroupError | None:
        failures = {rank: word.failure for rank, word in words.items() if word.failure} | self._departed
        phase = words[0].phase
        if len({word.title for word in words.values()}) > 1:
            said = {rank: repr(word.title) for rank, word in words.items()}
            return merge_disagreement(said, failures, title=self._title)
        if len({word.phase for word in words.values() if not word.left}) > 1:
            said = {rank: f"phase {word.phase!r} of {word.title}" for rank, word in words.items() if not word.left}
            return merge_disagreement(said, failures, title=self._title)
        if self._silent:
            return merge_silence(self._silent, failures, phase=phase, title=self._title)
        if failures:
            return merge_failures(failures, phase=phase, title=self._title)
        return None

    def _missed_call(self, words: dict[int, RankMessage]) -> str | None:
        """Name the call the others waited for and rank 0 never made, if this is how their words and ours differ."""
        if self._step > 0:
            return None
        given_up = {word.title for word in words.values() if word.gave_up}
        current = {word.title for word in words.values() if not word.gave_up}
        return min(given_up) if given_up and current == {self._title} and self._title not in given_up else None

    def _skip_call(self, words: dict[int, RankMessage], title: str) -> None:
        """Count the missed call as made, or this rank would be one call behind the others for ever."""
        everyone = {rank: f"did not make the call {title!r}" for rank in words if not words[rank].left}
        verdict = merge_silence(everyone, {}, phase="begin", title=title)
        self._silent |= dict.fromkeys(everyone, "")
        self._tell_all(verdict)
        self._departed, self._silent = {}, {}
        self._visit(self._number)

    def _tell_all(self, verdict: GroupError) -> None:
        body = encode(verdict)
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

    def _follow(self, word: RankMessage) -> bytes | GroupError:
        reply = self._exchange(word)
        while reply.missed and self._step == 1 and decode_group_error(reply.body).title != self._title:
            # Rank 0 gave up on a call this rank never made. Count it as made and answer in the next one.
            self._visit(self._number)
            reply = self._exchange(word)
        self._present = 0 if reply.missed else reply.present
        return decode_group_error(reply.body) if reply.failed else reply.body

    def _exchange(self, word: RankMessage) -> CoordinatorReply:
        body = encode(word)
        mine, answer = self._key("in", self._world.rank), self._key("out", self._world.rank)
        patience_s = 2 * self._world.timeout_s + self._world.alone_s
        self._visit(lambda mailbox: mailbox.put(mine, body))
        self._step += 1

        def errand(mailbox: KVMailbox) -> CoordinatorReply | bytes:
            if not mailbox.wait([answer], patience_s):
                mailbox.put(mine, encode(self._giving_up(word, patience_s)))
                return _last_note(mailbox, 0)
            return self._receive(mailbox, answer, unread=(mine, len(body)))

        reply = self._visit(errand, within_s=patience_s)
        if isinstance(reply, bytes):
            raise _NoAnswer(self._silence(patience_s, reply))
        return reply

    def _receive(self, mailbox: KVMailbox, answer: str, *, unread: tuple[str, int]) -> CoordinatorReply:
        reply = decode_reply(mailbox.take([answer])[0])
        if reply.missed:  # nobody else will delete what this rank said
            mailbox.drop(*unread)
        if not reply.shared:
            return reply
        [body] = mailbox.read([reply.shared])
        if mailbox.count(f"{reply.shared}/read") == reply.readers:
            mailbox.drop(reply.shared, len(body))
            mailbox.drop(f"{reply.shared}/read")
        return replace(reply, body=body)

    def _giving_up(self, word: RankMessage, patience_s: float) -> RankMessage:
        failure = Failure("RanksSilent", f"waited {patience_s:g} s for rank 0 and gave up")
        return RankMessage(title=word.title, phase=word.phase, failure=failure, left=True, gave_up=True)

    # -- all ranks ---------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Begin the call."""
        try:
            self._visit(self._number)
        except StoreUnreachable as lost:
            raise self._out_of_reach(RankMessage(title=self._title, phase="begin"), lost) from lost

    def _number(self, mailbox: KVMailbox) -> None:
        self._call = mailbox.count(f"calls/{self._world.rank}")
        self._step = 0
        self._note(mailbox, "")

    def _note(self, mailbox: KVMailbox, phase: str) -> None:
        mailbox.put(f"doing/{self._world.rank}", encode(RankActivity(self._call, self._step, phase, self._title)))

    def _leave(self, error: BaseException) -> None:
        """Tell the others that this rank takes part no more, unless they know of `error` already."""
        if self._left or self._cut or _comes_from(error, self._told):
            return
        self._left = True
        failure = describe_error(error)
        with contextlib.suppress(StoreUnreachable):
            if self._world.rank == 0:
                self._tell_all(merge_failures({0: failure}, phase="leave", title=self._title))
            else:
                key = self._key("in", self._world.rank)
                word = encode(RankMessage(title=self._title, phase="leave", failure=failure, left=True))
                self._visit(lambda mailbox: mailbox.put(key, word))
        if self._world.rank > 0 or not isinstance(error, Exception):
            self._present = 0

    def _part(self) -> None:
        """End the call: rank 0 stays until the others have its answer, as the store may end with its process."""
        if self._present == 0 or self._cut:
            return

        def errand(mailbox: KVMailbox) -> None:
            over, parted = f"{self._call}/over", f"{self._call}/parted"
            if self._world.rank > 0:
                if mailbox.count(parted) == self._present:
                    mailbox.put(over, b"")
            # Half the deadline at most: in the next call the others wait for this and for rank 0's own patience.
            elif mailbox.wait([over], min(LINGER_S, self._world.timeout_s / 2)):
                mailbox.drop(over)
                mailbox.drop(parted)

        # What was agreed on stands, whoever is there to see it.
        with contextlib.suppress(StoreUnreachable):
            self._visit(errand, within_s=LINGER_S)

    def _out_of_reach(self, word: RankMessage, lost: StoreUnreachable) -> CheckpointError:
        """Make the error of a rank that can no longer speak to the others."""
        self._cut = not isinstance(lost, _NoAnswer)
        text = f"cannot be reached: {lost}" if self._cut else str(lost)
        others = range(1, self._world.size) if self._world.rank == 0 else [0]
        own = {self._world.rank: word.failure} if word.failure else {}
        return merge_silence(dict.fromkeys(others, text), own, phase=word.phase, title=self._title).error()

    def _silence(self, waited_s: float, note: bytes) -> str:
        return f"did not answer within {waited_s:g} s; {describe_activity(note, call=self._call, title=self._title)}"

    def _key(self, way: str, number: int) -> str:
        return f"{self._call}/{self._step}/{way}/{number}"

    def _visit(self, errand: Callable[[KVMailbox], T], within_s: float | None = None) -> T:
        store, size = self._world.store, self._world.size
        if store is None:  # unreachable: a world of several ranks has a store
            raise StoreUnreachable("there is no store")
        # Who leaves, perhaps by Ctrl-C, does not stay to find out whether the store still works.
        patience_s = min(1.0, self._world.timeout_s) if self._left else self._world.timeout_s
        return with_mailbox(store, size, errand, within_s=patience_s if within_s is None else within_s)


@contextlib.contextmanager
def rendezvous(world: World, title: str) -> Iterator[Rendezvous]:
    """
    Begin a call that all ranks of `world` make together, and end it together.

    A rank that leaves by an exception tells the others, so they do not wait for it. Ranks must make their calls in
    the same order; `title` ("save to runs/a/step-10") is what they are compared by. A rank that missed a call
    altogether is put right in the next one, provided that the titles differ.

    Raises:
        RanksSilent: the store the ranks talk through cannot be reached.

    """
    meeting = Rendezvous(world, title)
    if world.solo:
        yield meeting
        return
    meeting._join()
    try:
        yield meeting
    except BaseException as error:
        meeting._leave(error)
        raise
    finally:
        meeting._part()


def _last_note(mailbox: KVMailbox, rank: int) -> bytes:
    key = f"doing/{rank}"
    return mailbox.read([key])[0] if mailbox.there(key) else b""


def _decided(decide: Callable[[list[bytes]], list[bytes]], payloads: list[bytes]) -> list[bytes]:
    answers = decide(payloads)
    if len(answers) != len(payloads):
        raise ValueError(f"{len(answers)} answers were decided on for {len(payloads)} ranks")
    return answers


def _comes_from(error: BaseException | None, origin: BaseException | None) -> bool:
    """Say whether `error` is `origin`, or was raised because of it."""
    seen: set[int] = set()
    while error is not None and origin is not None and id(error) not in seen:
        if error is origin:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
