"""A user's policy loss, registered or named by its file, and the errors for invalid ones."""

from __future__ import annotations

import pathlib

import pytest

from jaxalign.errors import UserError
from jaxalign.registry.policy_losses import POLICY_LOSSES
from tests.extending.brief import steps
from tests.extending.plugins import policy_loss as loss_plugin

PLUGINS = pathlib.Path(__file__).parent / "plugins"


@pytest.fixture
def registered():
    POLICY_LOSSES.register(loss_plugin.OFFSET)
    yield
    POLICY_LOSSES.unregister("offset")


@pytest.mark.slow
def test_a_policy_loss_trains_with_its_own_clip(registered):
    plain, own = steps(1), steps(1, policy_loss="offset")
    assert own[0]["policy_loss"] == pytest.approx(plain[0]["policy_loss"] + 0.1, abs=1e-5)
    assert loss_plugin.OFFSET.clip_range(None, None) == (0.1, 0.3)
    assert loss_plugin.OFFSET.clip_range(0.2, None) == (0.2, 0.2)
    assert loss_plugin.OFFSET.clip_range(None, 0.5) == (0.1, 0.5)
    assert steps(1, policy_loss=f"{PLUGINS / 'policy_loss.py'}:OFFSET") == own


@pytest.mark.medium
@pytest.mark.parametrize(("name", "message"), [
    ("SCALAR", r"loss 'scalar' returned a loss of float32 and shape \(\); a float32 array of shape \(8, 8\) is expected"),
    ("ALONE", r"policy loss 'alone' returned a value of type .*Tracer.*; \(loss, SurrogateStats\) is expected"),
])
def test_an_invalid_policy_loss_is_refused_with_a_sentence(name, message):
    with pytest.raises(UserError, match=message):
        steps(1, policy_loss=f"{PLUGINS / 'policy_loss.py'}:{name}")
