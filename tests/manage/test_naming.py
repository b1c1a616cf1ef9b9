"""Names of steps, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.errors import StateError
from shardkeep.manage.catalog import Naming

STEPS = st.integers(0, (1 << 63) - 1)
TEMPLATES = st.sampled_from(["step-{step}", "step-{step:08d}", "ckpt_{step}", "{step}", "run2{step}3", "a{step:03}"])


@given(STEPS, TEMPLATES)
def test_a_name_leads_back_to_its_step(step: int, template: str) -> None:
    """Every step has a name, and the name has that step."""
    naming = Naming(template)
    assert naming.step(naming.name(step)) == step


@given(st.text("step-0123456789 _", max_size=14), TEMPLATES)
def test_only_names_of_steps_are_taken(name: str, template: str) -> None:
    """A name that some step has is that step's, and no other name is any step's."""
    naming = Naming(template)
    step = naming.step(name)
    assert step is None or naming.name(step) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [("step-{step}", "step-007"), ("step-{step:08d}", "step-7"), ("step-{step}", "step--1"), ("step-{step}", "Step-1"),
     ("step-{step}", "step-1x"), ("step-{step}", "step-" + "9" * 30), ("step-{step}", "step-٣"), ("step-{step}", "step-")],
)  # fmt: skip
def test_names_of_others_are_left_alone(template: str, name: str) -> None:
    """Another spelling of a number is another name."""
    assert Naming(template).step(name) is None


@pytest.mark.parametrize(
    "template",
    ["", "step", "step-{}", "{step}-{step}", "{step}{epoch}", "a/{step}", "../{step}", "{step!r}", "{step:x}", "{step:,}",
     "{step:5.1f}", "{", "{step:300d}", "-{step}", ".tmp-{step}", "s {step}", "{step.real}", "{step:5d}", None],
)  # fmt: skip
def test_a_template_that_names_no_step_is_refused(template: str) -> None:
    """What cannot be read back, or is no name of a place, is an error that shows a template."""
    with pytest.raises(StateError, match="template") as caught:
        Naming(template)
    assert "step-{step}" in str(caught.value)
