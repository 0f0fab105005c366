"""A user's advantage estimator, registered or named by its file, and the errors for invalid ones."""

from __future__ import annotations

import pathlib

import chex
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.registry.advantages import ADVANTAGES, AdvantageEstimator
from jaxalign.rl.estimators import AdvantageInputs, estimate
from tests import tiny
from tests.extending.brief import steps
from tests.extending.plugins import advantage as plugin

PLUGINS = pathlib.Path(__file__).parent / "plugins"


@pytest.fixture
def registered():
    ADVANTAGES.register(plugin.CENTRED)
    yield
    ADVANTAGES.unregister("centred")


@pytest.mark.slow
def test_an_estimator_trains_by_name_and_by_file(registered):
    found = steps(advantages="centred")
    chex.assert_tree_all_finite(found)
    assert "value_loss" not in found[0]
    assert steps(advantages=f"{PLUGINS / 'advantage.py'}:CENTRED") == found


def test_its_advantages_equal_a_loop(registered):
    rng = np.random.default_rng(0)
    rewards, lengths = rng.normal(size=(4, 3)).astype(np.float32), np.array([3, 1, 2, 2])
    mask = np.arange(3)[None, :] < lengths[:, None]
    rewards, kept = rewards * mask, np.array([True, True, True, False])
    section = tiny.setup(advantages="centred").config
    mask = mask & kept[:, None]
    found, returns = estimate(AdvantageInputs(rewards, 0 * rewards, 0 * rewards, mask, kept, None, section))
    mean = np.mean([rewards[b].sum() for b in range(3)])
    expected = np.zeros((4, 3))
    for b, t in zip(*np.nonzero(mask), strict=True):
        expected[b, t] = (rewards[b].sum() - mean) / lengths[b]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.any(returns)


@pytest.mark.parametrize(("name", "message"), [
    ("BOTH", r"advantage estimator 'both' returned a value of type .*Tracer.*; \(advantages, returns\) is expected"),
    ("ROWS", r"'rows' returned advantages of float32 and shape \(8,\); a float32 array of shape \(8, 8\) is expected"),
    ("HALF", r"advantage estimator 'half' returned advantages of float16 and shape \(8, 8\); a float32 array of shape"),
    ("NAN", r"advantage estimator 'nan' returned advantages with non-finite entries although all inputs are finite"),
    ("RAISES", r"advantage estimator 'raises' raised AttributeError at .*advantage\.py:\d+: .*nothing"),
    ("GREEDY", "'greedy' reads inputs.baseline, but its record does not declare needs_greedy=True; add it"),
    ("CRITIC", "'critic' reads inputs.values, but its record does not declare needs_critic=True; add it"),
    ("RATIOS", "'ratios' reads inputs.log_ratios, but its record does not declare needs_trainer_logprobs=True; add it"),
    ("MISSPELT", "the reads of advantage estimator 'misspelt' has 'gama', which is not a field of .*: did you mean gamma"),
    ("NONE", r"'.*advantage.py:NONE', but .*advantage.py has no NONE"),
    ("centred", r"'.*advantage.py:centred', which is of type function; a jaxalign AdvantageEstimator is expected"),
])
def test_an_invalid_estimator_is_refused_with_a_sentence(name, message):
    with pytest.raises(UserError, match=message):
        steps(1, advantages=f"{PLUGINS / 'advantage.py'}:{name}")


def test_a_module_that_cannot_be_imported_and_a_taken_name_are_refused(registered):
    with pytest.raises(UserError, match="no_such_module cannot be imported"):
        steps(1, advantages="no_such_module:X")
    with pytest.raises(UserError, match="the advantage estimator 'gae' is already registered"):
        ADVANTAGES.register(AdvantageEstimator("gae", plugin.centred))


@pytest.mark.slow
def test_the_shape_of_an_undeclared_input_may_be_read():
    chex.assert_tree_all_finite(steps(1, advantages=f"{PLUGINS / 'advantage.py'}:SHAPES"))


def test_reads_must_be_a_tuple_of_names():
    with pytest.raises(UserError, match="the reads of advantage estimator 'mine' is 'gamma'; a tuple of field names"):
        AdvantageEstimator("mine", plugin.centred, reads="gamma")


def test_a_field_that_the_record_does_not_declare_names_the_record():
    with pytest.raises(UserError, match="gamma is 0.9, which has no effect .* or declare 'gamma' in reads in the record of "):
        steps(1, advantages=f"{PLUGINS / 'advantage.py'}:CENTRED", gamma=0.9)
