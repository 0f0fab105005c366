"""Ensembles, temperatures and margins of the preference stage, on a tiny run."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, PairBatch, Prompt
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.preference_quality import cross_fitted, measure
from jaxalign.trainers.scoring import pair_arrays
from tests.feedback.fakes import WordTokenizer
from tests.small_run import CONFIG, read, run

STAGES = ("pretrain", "revise", "sft", "compare", "preference", "ppo", "report")
CHANGES = {
    "stages": STAGES,
    "preference": CONFIG["preference"] | {"members": 2, "combine": "mean_minus_std", "std_weight": 0.5,
                                          "checkpoint_every": 4},
    "ppo": CONFIG["ppo"] | {"iterations": 1, "checks": {"step_zero": False}},
}


@pytest.fixture(scope="session")
def ensemble(done, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("ensemble")
    for stage in STAGES[:4]:
        shutil.copytree(done / stage, workdir / stage)
    run(workdir, **CHANGES)
    return workdir


@pytest.mark.slow
def test_members_are_trained_separately(ensemble):
    folder = ensemble / "preference"
    summary = read(folder / "summary.json")
    first, second = (read_metrics(place / "metrics.jsonl") for place in (folder, folder / "member-1"))
    assert len(first) == len(second) == summary["steps"] and first[0]["loss"] != second[0]["loss"]
    assert len(summary["members"]) == 2 and summary["combine"] == "mean_minus_std" and summary["std_weight"] == 0.5
    assert summary["disagreement"] > 0
    assert np.mean([member["scale"] for member in summary["members"]]) == pytest.approx(1)
    rows = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    assert sum(row["phase"] == "start" for row in rows) == 2 and not (folder / "member-1" / "timing.jsonl").exists()
    assert "Disagreement of the members" in (ensemble / "report.html").read_text()


@pytest.mark.slow
def test_the_reward_of_rl_combines_all_members(ensemble):
    """The combined score is scaled as the summary says, so it is of order 1."""
    row = read_metrics(ensemble / "ppo" / "metrics.jsonl")[0]
    assert np.isfinite(row["score"]) and abs(row["score"]) < 5 and np.isfinite(row["value_loss"])


@pytest.mark.slow
def test_the_first_member_equals_a_single_preference_model(ensemble, done):
    found, alone = (read_metrics(run / "preference" / "metrics.jsonl") for run in (ensemble, done))
    assert found == alone
    assert not (done / "preference" / "member-1").exists()
    assert "members" not in read(done / "preference" / "summary.json")


@pytest.mark.slow
def test_an_interruption_between_members_changes_nothing(ensemble, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(ensemble, again)
    folder = again / "preference"
    last = max(int(path.name) for path in (folder / "member-1" / "checkpoints").iterdir())
    shutil.rmtree(folder / "member-1" / "checkpoints" / str(last))
    shutil.rmtree(folder / "member-1" / "params")
    (folder / "summary.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(read(folder / "manifest.json") | {"status": "running"}))
    run(again, **CHANGES)
    for name in ("metrics.jsonl", "summary.json", "member-1/metrics.jsonl"):
        assert (folder / name).read_bytes() == (ensemble / "preference" / name).read_bytes()


def test_a_combination_rule_for_one_model_is_refused():
    with pytest.raises(UserError, match="config.preference.combine is 'min', which has no effect when"):
        from_config_dict({"preference": {"members": 1, "combine": "min"}})


def overconfident(pairs=400, factor=3.0):
    """Labels drawn from sigmoid(x), and scores of factor * x: the right temperature is the factor."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 2, pairs)
    label = (rng.random(pairs) < 1 / (1 + np.exp(-x))).astype(np.float32)
    scores = np.stack([factor * x, np.zeros(pairs)], axis=1).astype(np.float32)
    empty = np.zeros((pairs, 2, 1), np.int32)
    return scores, PairBatch(empty, empty[..., 0], label, np.ones(pairs, np.float32))


@pytest.mark.medium
def test_a_temperature_corrects_an_overconfident_model():
    scores, pairs = overconfident()
    plain, found = measure(scores, pairs), measure(scores, pairs, temperature_fit=True)
    fitted = found["temperature"]
    assert fitted["value"] == pytest.approx(3, rel=0.25) and fitted["folds"] == pytest.approx([3, 3], rel=0.4)
    assert fitted["ece_before"] == plain["held_out"]["ece"] and "temperature" not in plain
    assert fitted["ece_after"] == found["held_out"]["ece"] < 0.6 * fitted["ece_before"]
    for name in ("accuracy", "loss", "pairs"):  # the scores themselves do not change
        assert found["held_out"][name] == plain["held_out"][name]


def test_no_pair_is_measured_with_a_temperature_that_was_fitted_on_it():
    """If the pair were part of its own fit, flipping its label would change the temperature."""
    scores, pairs = overconfident(40)
    margin = scores[:, 0] - scores[:, 1]
    turned = pairs.label.copy()
    turned[6] = 1 - turned[6]
    (cooled, before), (again, after) = cross_fitted(margin, pairs.label), cross_fitted(margin, turned)
    assert cooled[6] == again[6] and cooled[7] != again[7] and before["value"] != after["value"]
    assert np.isfinite(cross_fitted(margin[:1], pairs.label[:1])[0]).all()


def test_margins_are_weighted_and_reach_the_loss():
    prompt = Prompt("p", (Message("user", "How?"),), "human")
    pairs = [Comparison(prompt, "a", "b", 1.0, margin=margin) for margin in (0.5, 0.0, None)]
    assert pair_arrays(WordTokenizer(), pairs, "compact", 32, 2.0).margin.tolist() == [1.0, 0.0, 0.0]
    assert pair_arrays(WordTokenizer(), pairs, "compact", 32).margin is None


def test_a_margin_weight_without_margins_is_refused():
    with pytest.raises(UserError, match="margin_weight is 1.0 but the pairs of config.data.source 'world' have no margins"):
        from_config_dict({"preference": {"margin_weight": 1.0}})


@pytest.mark.slow
def test_a_model_that_does_not_beat_its_baselines_stops_the_run_until_the_option_changes(done, tmp_path):
    """With early stopping and human pairs. The second run trains nothing: its metrics are those of the first."""
    workdir, path = tmp_path / "run", tmp_path / "human.jsonl"
    for stage in STAGES[:4]:
        shutil.copytree(done / stage, workdir / stage)
    rows = [{"prompt": f"Is {i} a number?", "chosen": "Yes.", "rejected": "No."} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = CONFIG["preference"] | {"early_stopping": True, "eval_every": 1, "patience": 1, "human": (str(path),),
                                      "human_weight": 0.5, "on_failure": "stop", "held_out_share": 0.3,
                                      "optimizer": {"learning_rate": 1e-9}}
    with pytest.raises(UserError, match="preference model is not reliably better than .* set config.preference.on_failure to"):
        run(workdir, stages=(*STAGES[:5], "report"), preference=section)
    folder = workdir / "preference"
    summary, metrics = read(folder / "summary.json"), (folder / "metrics.jsonl").read_bytes()
    run(workdir, stages=(*STAGES[:5], "report"), preference=section | {"on_failure": "warn"})
    assert (folder / "metrics.jsonl").read_bytes() == metrics and read(folder / "summary.json") == summary
    assert summary["ai"]["train_pairs"] + summary["human"]["train_pairs"] == summary["train_pairs"]
    assert summary["human"]["weight"] == 0.5 and summary["human"]["files"][0]["pairs"] == 20
    (stopped,) = summary["early_stopping"]["members"]
    losses = [row["held_out_loss"] for row in read_metrics(folder / "metrics.jsonl")]
    assert len(losses) == stopped["steps"] == summary["steps"]
    # The losses are compared as float32, in which those of two steps may be equal at this learning rate.
    assert np.float32(losses[stopped["best_step"] - 1]) == np.float32(min(losses))
    assert stopped["held_out_loss"] == pytest.approx(min(losses))
    page = (workdir / "report.html").read_text()
    for text in ("Warning: the preference model is not reliably better", "Weight of a human pair", "Loss that chose this step"):
        assert text in page
