"""`config.evaluate.lm_eval`: checks before the run, results of each model, and the section of the report."""

from __future__ import annotations

import json

import chex
import jax
import numpy as np
import pytest

import jaxalign as ja
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.errors import UserError
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.harness import language_model
from jaxalign.trainers import harness
from tests.folders import write_model
from tests.harness_tasks import NAMES, write_tasks
from tests.small_run import read

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval")

PROMPTS = "".join(json.dumps({"prompt": f"What is {number}?"}) + "\n" for number in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, tasks and prompts."""
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "model")
    write_tasks(folder / "tasks")
    (folder / "prompts.jsonl").write_text(PROMPTS)
    return folder


def config(folder, lora=None, **evaluate):
    return from_config_dict({
        "lora": lora or {},
        "stages": ("evaluate", "report"), "compile_cache": None, "tracking": {"system_seconds": 0, "live_report_seconds": 0},
        "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 96},
        "data": {"source": "prompts_jsonl", "rl": str(folder / "prompts.jsonl")},
        "evaluate": {"prompts": 2, "batch": 4, "win_rate_prompts": 0, "max_new_tokens": 4, "lm_eval": NAMES,
                     "lm_eval_include": str(folder / "tasks")} | evaluate,
    })


@pytest.fixture(scope="module")
def workdir(folder):
    pipeline.run(config(folder, lm_eval_limit=4), folder / "work")
    return folder / "work"


def test_the_summary_has_the_results_of_the_library(workdir, folder):
    model = ja.load_model(folder / "model", max_length=96)
    expected = ja.lm_eval({"base": model}, NAMES, include=folder / "tasks", limit=4, batch=4, progress=False)
    assert read(workdir / "summary.json")["lm_eval"] == expected
    choice = expected["base"]["made_choice"]
    assert (choice["documents"], choice["shots"], choice["version"]) == (4, 2, "2")
    assert set(choice["metrics"]) == {"acc", "acc_norm"}


def test_the_report_has_a_row_for_each_metric(workdir):
    page = (workdir / "report.html").read_text()
    value = read(workdir / "summary.json")["lm_eval"]["base"]["made_choice"]["metrics"]["acc"]
    assert "Tasks of lm-evaluation-harness" in page and "acc_norm" in page
    assert f"{value['value']:.4g} ± {value['stderr']:.2g}" in page


def test_a_resumed_stage_runs_only_the_models_without_results(workdir, folder, monkeypatch):
    results = read(workdir / "evaluate" / "lm_eval" / "base.json")
    manifest = workdir / "evaluate" / "manifest.json"
    manifest.write_text(json.dumps(read(manifest) | {"status": "running"}))
    monkeypatch.setattr(harness, "run_tasks", lambda *arguments: pytest.fail("the tasks are run again"))
    pipeline.run(config(folder, lm_eval_limit=4), workdir)
    assert read(workdir / "summary.json")["lm_eval"] == {"base": results}


def test_a_model_of_a_run_has_its_adapters_over_their_base(folder, tmp_path):
    policy = ja.load_model(folder / "model", lora=ja.Lora(rank=2, alpha=4.0))
    policy = policy.with_params(jax.tree.map(lambda x: x + 0.1, policy.params))
    policy.save(tmp_path / "adapters", adapters=True)
    context = StageContext(resolve_auto(config(folder, {"path": str(tmp_path / "adapters")})), tmp_path, tmp_path, False)
    tokenizer = run_models.load_tokenizer(context)
    found = language_model(context, run_models.make_model(context.config, tokenizer.vocab_size), tokenizer, "base")
    ids = np.arange(24, dtype=np.int32).reshape(2, 12)
    hidden = [one.model.hidden(one.weights, ids) for one in (found, policy)]
    chex.assert_trees_all_close(*hidden, atol=2e-5)
    assert np.abs(hidden[0] - policy.model.base.hidden(policy.frozen, ids)).max() > 1e-3


def test_an_unknown_task_is_refused_before_the_run(folder, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(harness, "_manager", lambda tasks, include: TaskManager(include_path=include, include_defaults=False))
    message = "has 'made_choise', which is not a task, group or tag of lm-eval; did you mean made_choice"
    with pytest.raises(UserError, match=message):
        pipeline.run(config(folder, lm_eval=("made_choise",)), tmp_path / "work")
    assert not (tmp_path / "work" / "evaluate").exists()


@pytest.mark.parametrize(("values", "message"), [
    ({"lm_eval_include": "nowhere"}, "config.evaluate.lm_eval cannot use the tasks of nowhere, which is not a folder"),
    ({"lm_eval": ("made_text", "made_text")}, "config.evaluate.lm_eval has 'made_text' twice"),
    ({"lm_eval": ()}, "config.evaluate.lm_eval_include .*has no effect"),
])
def test_mistakes_are_named(folder, tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        pipeline.run(config(folder, **values), tmp_path / "work")


def test_a_missing_package_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"config.evaluate.lm_eval needs lm-eval, .*`pip install 'jaxalign\[eval\]'"):
        pipeline.run(config(folder), tmp_path / "work")
