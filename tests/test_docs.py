"""The pages say what the code does: the defaults they state are the config's."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from jaxalign.config import Config, Dpo, Ppo

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize(("page", "section"), [("ppo.md", Ppo()), ("dpo.md", Dpo())])
def test_defaults_on_a_page_are_the_configs(page, section):
    """Where a page writes `field` (value...), the value is the field's default."""
    text = (DOCS / page).read_text(encoding="utf-8")
    known = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    known |= {f"optimizer.{f.name}": getattr(section.optimizer, f.name) for f in dataclasses.fields(section.optimizer)}
    known |= {f"model.{f.name}": getattr(Config().model, f.name) for f in dataclasses.fields(Config().model)}
    found = [(name, stated) for name, stated in re.findall(r"`([\w.]+)` \(`?([^`:;,) ]+)", text) if name in known]
    wrong = [f"{name}: {stated}, is {known[name]}" for name, stated in found if not _same(stated, known[name])]
    assert not wrong
    assert page != "ppo.md" or len(found) > 30


def _same(stated: str, value) -> bool:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return stated == str(value)
    try:
        return float(stated) == float(value)
    except ValueError:
        return False


def test_every_page_that_the_config_names_exists():
    text = (DOCS.parent / "jaxalign" / "config.py").read_text(encoding="utf-8")
    pages = set(re.findall(r"docs/([\w/]+\.md)", text))
    assert pages and all((DOCS / page).exists() for page in pages)
