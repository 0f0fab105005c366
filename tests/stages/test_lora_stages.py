"""Every stage with adapters: one base, folders that hold adapters only, passing checks, exact resume."""

from __future__ import annotations

import json
import shutil

import chex
import jax
import numpy as np
import pytest

from jaxalign.config import from_config_dict
from jaxalign.models.adapters.lora import LoraAdapters, merge
from jaxalign.models.model import Model
from jaxalign.rewards.scorer import Ensemble, Scorer, stack_members
from jaxalign.stages.shared import run_models
from jaxalign.steps.checkpoint import load_params
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.student import first_layers
from tests import tiny
from tests.adapters import adapted
from tests.compilations import SEEN
from tests.small_run import CONFIG, read, rows, run

pytestmark = pytest.mark.slow

STAGES = ("pretrain", "revise", "sft", "compare", "preference", "dpo", "ppo", "evaluate", "report")
LORA = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["attention.*", "down_proj"]}, "stages": list(STAGES),
        "dpo": {"batch": 8, "epochs": 1, "max_length": 192},
        "preference": CONFIG["preference"] | {"members": 2}}


@pytest.fixture(scope="module")
def adapted_run(done, tmp_path_factory):
    """A finished run with adapters on the base and the revisions of the shared run, which adapters do not change."""
    workdir = tmp_path_factory.mktemp("lora")
    for stage in STAGES[:2]:
        shutil.copytree(done / stage, workdir / stage)
    count = len(SEEN)
    run(workdir, **LORA)
    compiled = [function for function, _ in SEEN[count:]]
    # The programs that were compiled ahead are those that run.
    assert [compiled.count(f"jit({name})") for name in ("packed_experience", "step_zero_values", "packed_update")] == [1, 1, 1]
    return workdir


def model_of(head="lm") -> Model:
    return run_models.make_model(from_config_dict(CONFIG | LORA), CONFIG["world"]["vocab_size"], head)


def test_every_folder_holds_only_adapters(adapted_run):
    model = model_of()
    assert set(load_params(adapted_run / "pretrain" / "params", model.base)) == {"embedding", "blocks", "final_norm"}
    for stage in ("sft", "dpo", "ppo"):
        params = load_params(adapted_run / stage / "params", model)
        assert set(params) == {"adapters"} and set(params["adapters"]) == {"attention", "mlp"}
        assert set(params["adapters"]["mlp"]) == {"down"}
        assert all(np.abs(own["b"]).max() > 0 for part in params["adapters"].values() for own in part.values())
    for folder in ("preference", "preference/member-1"):
        assert set(load_params(adapted_run / folder / "params", model.with_head("scalar"))) == {"adapters", "score"}


def test_the_checks_pass_and_the_reference_is_the_initial_policy_of_rl(adapted_run):
    """Policy and reference start from the adapters of dpo; the supervised model is that of sft."""
    checks = read(adapted_run / "ppo" / "summary.json")["checks"]
    assert [check["name"] for check in checks if check["passed"]] == [check["name"] for check in checks] and len(checks) == 5
    assert abs(read_metrics(adapted_run / "ppo" / "metrics.jsonl")[0]["kl_k1"]) < 1e-3
    kl = read(adapted_run / "summary.json")["kl"]
    assert abs(kl["sft"]) < 1e-3 and len(rows(adapted_run, "evaluate")) == 4 * 16
    for stage in ("sft", "preference", "dpo"):
        losses = [row["loss"] for row in read_metrics(adapted_run / stage / "metrics.jsonl")]
        assert np.isfinite(losses).all()


def test_an_interrupted_ppo_run_ends_like_an_uninterrupted_one_with_another_interval_of_checkpoints(adapted_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(adapted_run, workdir)
    shutil.rmtree(workdir / "ppo" / "checkpoints" / "3")
    shutil.rmtree(workdir / "ppo" / "params")
    manifest = read(workdir / "ppo" / "manifest.json") | {"status": "running"}
    (workdir / "ppo" / "manifest.json").write_text(json.dumps(manifest))
    stages = [stage for stage in STAGES if stage not in ("evaluate", "report")]
    run(workdir, **LORA | {"stages": stages, "ppo": CONFIG["ppo"] | {"checkpoint_every": 1}})
    model = model_of()
    found, expected = (tiny.to_host(load_params(folder / "ppo" / "params", model)) for folder in (workdir, adapted_run))
    chex.assert_trees_all_equal(found, expected)


def test_a_student_of_an_adapted_teacher_starts_from_its_merged_weights():
    lora = LoraAdapters(3, 5.0, ("*",))
    members = [adapted(lora, head="scalar", seed=seed)[1] | {"score": np.float32(seed) * np.ones(16, np.float32)}
               for seed in (1, 2)]
    teacher, student = adapted(lora, head="scalar")[0], tiny.model(head="scalar", layers=1)
    expected = merge(lora, members[0])
    expected |= {"blocks": jax.tree.map(lambda x: x[:1], expected["blocks"])}
    chex.assert_trees_all_equal(first_layers((Scorer(teacher), members[0]), student), expected)
    stacked, ensemble = stack_members(members), Ensemble((0.0, 0.0), (1.0, 1.0), "mean", 0.0)
    chex.assert_trees_all_equal(first_layers((Scorer(teacher, ensemble=ensemble), stacked), student), expected)
