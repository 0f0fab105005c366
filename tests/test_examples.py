"""Every script in examples/ runs with tiny settings and writes a folder that loads."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

import jaxalign as ja
from jaxalign.models.checkpoints.huggingface import read_config
from tests.folders import write_model

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("few_sampling_programs", "no_checks_of_step_zero")]

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
SMALL = {
    "best_of_n": ("--n=2", "--max_new_tokens=8", "--epochs=1"),
    "constitutional_ai": ("--epochs=1", "--max_new_tokens=8"),
    "dpo": ("--epochs=2",),
    "kto": ("--epochs=2",),
    "own_loop": ("--iterations=2", "--max_new_tokens=8", "--group_size=2"),
    "reward_model": ("--epochs=1",),
    "sft": ("--epochs=1", "--row_length=64"),
}
RL = ("--iterations=2", "--batch=8", "--max_new_tokens=8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.mark.variants(1)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_script_runs(path, model, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(model), str(tmp_path / "out"), *SMALL.get(path.stem, RL)])
    assert capsys.readouterr().out
    if read_config(tmp_path / "out").head == "lm":
        ja.load_model(tmp_path / "out")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_script_is_short_and_uses_only_the_public_api(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80 and "from jaxalign" not in text and "import jaxalign as ja" in text
