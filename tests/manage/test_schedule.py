"""When saves are due."""

from hypothesis import given
from hypothesis import strategies as st

from shardkeep.manage.schedule import Flag, StepSchedule, Timer


def due(schedule: StepSchedule, steps: range | list[int]) -> list[int]:
    return [step for step in steps if schedule.reached(step)]


def test_every_so_many_steps() -> None:
    """Multiples, and never step 0."""
    assert due(StepSchedule(every=4), range(13)) == [4, 8, 12]
    assert due(StepSchedule(every=1), range(3)) == [1, 2]


def test_a_resumed_job_does_not_save_again_what_it_restored() -> None:
    """It counts from the step that was restored."""
    schedule = StepSchedule(every=4)
    schedule.begin_after(8)
    assert due(schedule, range(8, 17)) == [12, 16]


def test_the_first_step_of_a_job_is_due_only_by_its_number() -> None:
    """A job that begins in the middle does not save at once."""
    assert due(StepSchedule(every=10), range(15, 31)) == [20, 30]


def test_steps_that_are_not_reported_are_made_up_for() -> None:
    """A multiple that was passed over is due at the next step that is reported, once."""
    assert due(StepSchedule(every=10), [1, 9, 12, 13, 29, 31, 55]) == [12, 29, 31, 55]
    assert due(StepSchedule(at=[5, 6, 20]), [1, 4, 8, 9, 20, 21]) == [8, 20]


def test_going_back_is_not_due() -> None:
    """The same step twice, or an earlier one, is not due again."""
    assert due(StepSchedule(every=2), [2, 2, 1, 2, 3, 4]) == [2, 4]


@given(st.integers(1, 7), st.lists(st.integers(0, 30), max_size=3), st.lists(st.integers(0, 40), unique=True))
def test_due_once_for_each_point_that_is_passed(every: int, at: list[int], steps: list[int]) -> None:
    """Compared with going through all numbers one by one."""
    steps.sort()
    points = {step for step in range(1, 41) if step % every == 0} | set(at)
    expected = []
    last = steps[0] - 1 if steps else 0
    for step in steps:
        if points & set(range(last + 1, step + 1)):
            expected.append(step)
        last = step
    assert due(StepSchedule(every=every, at=at), steps) == expected


def test_time_since_the_last_save() -> None:
    """By a clock that the test moves."""
    now = [100.0]
    timer = Timer(2, lambda: now[0])
    assert not timer.due()
    now[0] += 119
    assert not timer.due()
    now[0] += 1
    assert timer.due()
    timer.restart()
    assert not timer.due()
    assert not Timer(None, lambda: now[0]).due()


def test_what_was_asked_for_is_taken_once() -> None:
    """A flag is down after it was seen."""
    flag = Flag()
    assert not flag.take()
    flag.set()
    flag.set()
    assert flag.take()
    assert not flag.take()
