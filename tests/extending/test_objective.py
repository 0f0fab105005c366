"""A user's preference objective, registered or named by its file, used by itself and in a sum."""

from __future__ import annotations

import importlib
import pathlib
import sys

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.registry.objectives import OBJECTIVES, Objective
from jaxalign.trainers.direct import DPO
from tests.extending.plugins import objective as plugin
from tests.trainers.small import PAIRS, language_model

pytestmark = pytest.mark.medium

PLUGIN = pathlib.Path(__file__).parent / "plugins" / "objective.py"
FIELDS = {"batch": 4, "epochs": 2, "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0}}


def losses(objective: str, **fields) -> list[float]:
    return [step.metrics["loss"] for step in DPO(language_model(), objective, **FIELDS, **fields).fit(PAIRS)]


@pytest.fixture
def registered():
    OBJECTIVES.register(plugin.SQUARED)
    yield
    OBJECTIVES.unregister("squared")


def test_it_trains_by_name_and_by_file(registered):
    found = losses("squared", beta=0.5)
    assert found[0] == pytest.approx(1.0, abs=1e-5)  # At the reference h is 0, and every label is 1.
    assert found[-1] < found[0]
    assert losses(f"{PLUGIN}:SQUARED", beta=0.5) == found


def test_it_can_be_a_term_of_a_sum(registered):
    found = losses("squared+sigmoid", beta=0.5, weights=(2.0, 0.5))
    assert found[0] == pytest.approx(2.0 + 0.5 * np.log(2), abs=1e-5)


def test_a_function_that_was_defined_again_is_used(tmp_path, monkeypatch):
    """Objectives are static for the jitted step by name, and the name did not change."""
    monkeypatch.syspath_prepend(tmp_path)
    text = "from jaxalign.registry.objectives import Objective\nOWN = Objective('own', lambda inputs: 0 * inputs.first + {})\n"
    (tmp_path / "defined_again.py").write_text(text.format(1))
    assert losses("defined_again:OWN")[0] == pytest.approx(1)
    (tmp_path / "defined_again.py").write_text(text.format(25))  # Of another size: the times may be equal.
    importlib.reload(sys.modules["defined_again"])
    assert losses("defined_again:OWN")[0] == pytest.approx(25)


@pytest.mark.parametrize(("name", "message"), [
    ("SCALAR", r"objective 'scalar' returned a loss of float32 and shape \(\); a float32 array of shape \(4,\) is expected"),
    ("NAN", "returned a loss of nan on the first batch; a finite number for each row is expected"),
    ("NONE", r"DPO.objective is '.*objective.py:NONE', but .*objective.py has no NONE"),
    ("squared", r"DPO.objective is '.*objective.py:squared', which is of type function; a jaxalign Objective is expected"),
])
def test_an_invalid_objective_is_refused_with_a_sentence(name, message):
    with pytest.raises(UserError, match=message):
        losses(f"{PLUGIN}:{name}")


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(UserError, match=r"DPO.objective is 'no_such_module:X': no_such_module cannot be imported"):
        losses("no_such_module:X")


def test_a_taken_name_is_refused(registered):
    with pytest.raises(UserError, match="the objective 'sigmoid' is already registered"):
        OBJECTIVES.register(Objective("sigmoid", plugin.squared))


def test_reads_of_an_objective_are_fields_of_dpo():
    with pytest.raises(UserError, match=r"the reads of objective 'mine' is \['margin'\]; a tuple of field names"):
        Objective("mine", plugin.squared, reads=["margin"])
    with pytest.raises(UserError, match="the reads of objective 'mine' has 'margn', .* did you mean margin"):
        DPO(language_model(), Objective("mine", plugin.squared, reads=("margn",)))
    with pytest.raises(UserError, match="margin is 1.0, which has no effect .* or declare 'margin' in reads in the record of "):
        losses(f"{PLUGIN}:SQUARED", margin=1.0)
