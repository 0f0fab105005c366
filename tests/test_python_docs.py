"""Every snippet in docs/python.md runs unchanged, with a tiny model as FOLDER."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.folders import write_model

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("few_sampling_programs", "no_checks_of_step_zero")]

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "python.md"
SNIPPETS = dict(re.findall(r"^## (.+?)\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
LINES = {"Supervised fine-tuning": 5, "Direct preference optimisation": 10, "PPO with a reward in Python": 15}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "FOLDER")


@pytest.mark.variants(3)
@pytest.mark.parametrize("title", SNIPPETS)
def test_the_snippet_runs(title, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").symlink_to(model)
    exec(compile(SNIPPETS[title], f"docs/python.md: {title}", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out


def test_the_page_has_at_least_nine_snippets():
    assert len(SNIPPETS) >= 9 and len(re.findall("```python", PAGE.read_text(encoding="utf-8"))) == len(SNIPPETS)


@pytest.mark.parametrize(("title", "most"), LINES.items())
def test_the_short_snippets_are_short(title, most):
    """Imports and blank lines are not counted."""
    lines = [line for line in SNIPPETS[title].splitlines() if line.strip() and line != "import jaxalign as ja"]
    assert len(lines) <= most
