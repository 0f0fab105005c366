"""The entry-point groups of the registries, and the errors for a name that is taken."""

from __future__ import annotations

import pathlib

import pytest

from jaxalign import registries
from jaxalign.errors import UserError
from jaxalign.registries import ADVANTAGES, AdvantageEstimator
from jaxalign.registry.core import Registry

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")


def test_the_page_lists_the_group_of_every_registry():
    listed = PAGE.split("The groups are")[1].split(":\n")[0]
    groups = {registry.group for registry in vars(registries).values() if isinstance(registry, Registry)}
    names = {name.removeprefix("jaxalign.") for name in listed.split("`")[1::2]}
    assert {f"jaxalign.{name}" for name in names} == groups


def test_a_name_that_a_user_has_taken_can_be_removed():
    first, second = (AdvantageEstimator("mine", function) for function in (len, sum))
    ADVANTAGES.register(first)
    try:
        with pytest.raises(UserError, match=r"'mine' is already registered; .* call unregister\('mine'\) of its registry"):
            ADVANTAGES.register(second)
        ADVANTAGES.unregister("mine")
        assert ADVANTAGES.register(second) is second
    finally:
        ADVANTAGES.unregister("mine")
