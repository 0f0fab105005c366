"""The notebooks run: their cells are executed in order, with tiny settings."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.small_run import CONFIG

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] != "code" or "install" in tags:
            continue
        exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)
        if "settings" in tags:
            names["config"].update(CONFIG)
    printed = capsys.readouterr().out
    assert "helps with harm" in printed and "Report: " in printed and "iteration 2: score" in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_the_public_api_is_imported(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "import jaxalign as ja" in source and "from jaxalign" not in source
