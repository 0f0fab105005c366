"""The notebooks run: their cells are executed in order, with tiny settings, and print what their text says."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import subprocess
import sys

import pytest

from jaxalign import plan
from tests.folders import write_model
from tests.small_run import CONFIG

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
TRAINS = {
    # The settings that replace those of the cell with the tag "settings", and words that the cells print.
    "cai_own_model": ({"NEW_TOKENS": 12, "EPOCHS": 1}, ["critique:", "revisions are usable", "before:", "{'before': "]),
    "ppo_own_reward": ({"ITERATIONS": 2, "BATCH": 4, "NEW_TOKENS": 12}, ["iteration 1: score", "reference KL: 0 ", "after:"]),
    "dpo_pairs": ({"EPOCHS": 2}, ["step 0: loss 0.693", "Name a tool."]),
    "lora_one_gpu": ({"EPOCHS": 2, "BASES": ["nf4"]},
                     ["base model in nf4: L4x1: ", "frozen parameters", "adapters: ", "merged: "]),
}
PLANS = {"planning": ({"TOPOLOGIES": ["v5e:4x4"]}, ["v5e:4x4: fits", "L4x1: "])}
IN_A_KERNEL = {"tpu_pod": ["v5e:4x4: fits", "jaxalign plan --config", "launch/tpu_pod.sh align us-central2-b"]}
RUNS = {"quickstart": ["helps with harm", "Report: ", "iteration 2: score"],
        "reading_a_report": ["harmful", "  outcomes: {", "  reasons: {", "passed", "Report: "]}


def cells(path: pathlib.Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder like notebooks/, with a random model in the place of the exported one."""
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "runs" / "world").mkdir(parents=True)
    write_model(folder / "runs" / "world" / "model", max_length=1024)
    return folder


def execute(name: str, folder: pathlib.Path, monkeypatch, settings: dict) -> dict:
    """Run all cells in one namespace and return it."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the commands that cells start
    names: dict = {}
    for cell in cells(NOTEBOOKS[name]):
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] != "code" or "install" in tags:
            continue
        exec(compile("".join(cell["source"]), f"{name}.ipynb:{cell['id']}", "exec"), names)
        if "settings" in tags:
            assert set(settings) <= set(names)
            names.update(settings)
        if "config" in tags:
            names["config"].update(CONFIG)
    return names


@pytest.fixture
def plans_in_this_process(monkeypatch):
    """Run `python -m jaxalign.plan` of a cell in this process. The notebooks in a kernel start a process for it."""
    run, start = subprocess.run, [sys.executable, "-m", "jaxalign.plan"]

    def run_here(command, *args, **options):
        if command[:3] != start:
            return run(command, *args, **options)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = plan.main(command[2:])
        return subprocess.CompletedProcess(command, code, printed.getvalue())

    monkeypatch.setattr(subprocess, "run", run_here)


def test_every_notebook_is_tested():
    assert set(NOTEBOOKS) == {*TRAINS, *PLANS, *IN_A_KERNEL, *RUNS}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINS, *PLANS])
@pytest.mark.usefixtures("plans_in_this_process")
def test_every_cell_runs(name, folder, monkeypatch, capsys, few_sampling_programs):
    pytest.importorskip("matplotlib")
    settings, words = (TRAINS | PLANS)[name]
    execute(name, folder, monkeypatch, settings)
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


@pytest.mark.slow
def test_every_cell_of_the_notebooks_of_the_default_run_runs(folder, monkeypatch, capsys, few_sampling_programs):
    """They share a work directory, so that the second one reads the run of the first."""
    pytest.importorskip("matplotlib")
    for name, words in RUNS.items():
        execute(name, folder, monkeypatch, {})
        printed = capsys.readouterr().out
        assert all(word in printed for word in words), printed


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", IN_A_KERNEL)
def test_a_notebook_runs_in_a_kernel(name, tmp_path, monkeypatch):
    """As Jupyter runs it. A kernel for each notebook would compile the same programs several times."""
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert all(word in printed for word in IN_A_KERNEL[name]), printed


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_imports_only_the_public_api_and_has_no_outputs(name):
    code = [cell for cell in cells(NOTEBOOKS[name]) if cell["cell_type"] == "code"]
    source = "\n".join("".join(cell["source"]) for cell in code)
    assert "import jaxalign as ja" in source and "from jaxalign" not in source
    assert "install" in code[0]["metadata"]["tags"] and not any(cell["outputs"] for cell in code)
