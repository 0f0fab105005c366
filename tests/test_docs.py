"""The pages say what the code does: the defaults they state are the config's."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from jaxalign.config import Config, Dpo, Ppo

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


def test_defaults_on_the_ppo_page_are_the_configs():
    """Where the page writes `field` (value...), the value is the field's default."""
    section = Ppo()
    known = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    known |= {f"optimizer.{f.name}": getattr(section.optimizer, f.name) for f in dataclasses.fields(section.optimizer)}
    known |= {f"model.{f.name}": getattr(Config().model, f.name) for f in dataclasses.fields(Config().model)}
    stated = re.findall(r"`([\w.]+)` \(`?([^`:;,) ]+)", (DOCS / "ppo.md").read_text(encoding="utf-8"))
    found = [(name, value) for name, value in stated if name in known]
    assert len(found) > 30
    assert not [f"{name}: {value}, is {known[name]}" for name, value in found if not _same(value, known[name])]


def test_defaults_on_the_dpo_page_are_the_configs():
    """The last two columns of its table are the option and its default."""
    text = (DOCS / "dpo.md").read_text(encoding="utf-8")
    found = re.findall(r"\| `dpo\.(\w+)` \| `?([^`|]+?)`? \|$", text, re.MULTILINE)
    assert {"reference", "micro_batches", "max_length"} <= {name for name, _ in found}
    assert not [name for name, value in found if not _same(value, getattr(Dpo(), name))]


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
