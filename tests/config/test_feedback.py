"""Combinations of feedback fields that cannot act."""

from __future__ import annotations

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError


def test_several_chains_of_thought_need_a_temperature():
    """At temperature 0 they would all be equal."""
    with pytest.raises(UserError, match="config.feedback.reasonings is 3, but config.feedback.reasoning_temperature is 0"):
        from_config_dict({"feedback": {"reasonings": 3}})
    assert from_config_dict({"feedback": {"reasonings": 3, "reasoning_temperature": 0.7}}).feedback.reasonings == 3
