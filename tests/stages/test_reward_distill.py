"""reward_distill on a tiny run: the student's training, its files, and its use in RL."""

from __future__ import annotations

import json
import shutil

import chex
import jax
import numpy as np
import pytest

from jaxalign.config import RewardDistillConfig, from_config_dict
from jaxalign.data.sources.base import PromptSets
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt, Rollout
from jaxalign.rewards.scorer import Scorer, student_model
from jaxalign.stages import reward_distill
from jaxalign.stages.reward_distill import agreement, fresh_pairs
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.shards import Shards, queues
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.preference_quality import accuracy
from jaxalign.trainers.student import first_layers
from tests import tiny
from tests.feedback.fakes import WordTokenizer
from tests.small_run import CONFIG, phases_with_operations, read, rows, run
from tests.tracking.pages import check_links

pytestmark = pytest.mark.slow

STAGES = ("pretrain", "revise", "sft", "compare", "preference", "reward_distill", "ppo", "report")
SECTION = {"layers": 1, "embed": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 24, "prompts": 128, "samples": 4,
           "batch": 64, "max_new_tokens": 24, "held_out_share": 0.2, "epochs": 6, "batch_pairs": 8, "checkpoint_every": 50,
           "optimizer": {"learning_rate": 1e-2}}
CHANGES = {"stages": STAGES, "reward": {"source": "distilled"}, "reward_distill": SECTION,
           "ppo": CONFIG["ppo"] | {"iterations": 1, "checks": {"step_zero": False}}}


@pytest.fixture(scope="session")
def distilled(done, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("distilled")
    for stage in STAGES[:5]:
        shutil.copytree(done / stage, workdir / stage)
    run(workdir, **CHANGES)
    return workdir


@pytest.mark.slow
def test_phases_have_operations(distilled):
    assert phases_with_operations(distilled / "reward_distill") == {"generate", "score", "train"}


def test_the_student_ranks_answers_like_its_teacher(distilled):
    """On prompts that it never saw, the student agrees with the teacher above chance by more than the interval. It is
    smaller."""
    summary = read(distilled / "reward_distill" / "summary.json")
    assert 40 <= summary["agreement"]["pairs"] <= 52 and summary["agreement"]["low"] > 0.55
    assert summary["agreement"]["pearson"] > 0.6 and summary["agreement"]["spearman"] > 0.6
    assert summary["parameters"]["student"] < summary["parameters"]["teacher"]
    found = [row["agreement"] for row in read_metrics(distilled / "reward_distill" / "metrics.jsonl")]
    assert np.mean(found[-10:]) > max(0.7, np.mean(found[:5]))


def test_training_and_evaluation_pairs(distilled, done):
    summary = read(distilled / "reward_distill" / "summary.json")
    found = rows(distilled, "reward_distill")
    assert len({row["prompt_id"] for row in found}) == len(found) == 128
    assert all(len(row["responses"]) == 4 and row["source"] == "rl" for row in found)
    preference = read(done / "preference" / "summary.json")
    assert summary["fresh_pairs"] == 2 * 102  # a fifth of the 128 prompts, 26, is held out
    assert summary["train_pairs"] == summary["fresh_pairs"] + preference["train_pairs"]
    assert preference["held_out"] is None  # A labeller this small is never certain, so there are no labels to compare with.
    assert summary["labelled"] == {"teacher": None, "student": None}
    speed = read(distilled / "reward_distill" / "speed.json")
    assert {"reward_distill", "rl"} <= set(check_links(distilled / "report.html"))
    assert speed["rows"] == 64 and speed["speedup"] == pytest.approx(speed["teacher_seconds"] / speed["student_seconds"])


@pytest.mark.slow
def test_the_student_rewards_rl(distilled, done):
    """At step 0 rollouts and critic are those under the teacher, and the scores differ."""
    found, before = (read_metrics(run / "ppo" / "metrics.jsonl")[0] for run in (distilled, done))
    assert found["kl_k3"] == before["kl_k3"] and found["response_length"] == before["response_length"]
    assert found["score"] != before["score"] and abs(found["score"] - before["score"]) < 1.5
    assert set(read(distilled / "ppo" / "manifest.json")["inputs"]) == {"sft", "preference", "reward_distill"}
    page = (distilled / "report.html").read_text()
    assert "The distilled reward model" in page and "Speed-up" in page


def test_an_interrupted_stage_ends_the_same(distilled, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(distilled, again)
    folder = again / "reward_distill"
    (folder / "rows-00003.jsonl").unlink()
    last = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    shutil.rmtree(folder / "checkpoints" / str(last))
    shutil.rmtree(folder / "params")
    (folder / "manifest.json").write_text(json.dumps(read(folder / "manifest.json") | {"status": "running"}))
    run(again, **CHANGES)
    for name in ("rows-00003.jsonl", "metrics.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (distilled / "reward_distill" / name).read_bytes()


def test_accuracy_by_hand():
    """The student ranks two of the three pairs with a label that is not even as the label does; the fourth pair has no
    label."""
    scores = np.asarray([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [5.0, 1.0]])
    found = accuracy(scores, np.asarray([0.9, 0.8, 1.0, 0.5]))
    assert (found["pairs"], found["accuracy"]) == (3, 2 / 3) and found["low"] < 2 / 3 < found["high"]
    assert accuracy(scores, np.full(4, 0.5)) is None


def test_agreement_by_hand():
    """The teacher separates three pairs, and the student agrees on two; a tied pair counts only for the correlation."""
    teacher = np.asarray([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    student = np.asarray([[0.5, 0.1], [0.2, 0.9], [0.3, 0.4], [0.6, 0.5]])
    found = agreement(teacher, student)
    assert (found["pairs"], found["rate"]) == (3, 2 / 3)
    assert found["pearson"] == pytest.approx(np.corrcoef(teacher.reshape(-1), student.reshape(-1))[0, 1])
    assert agreement(np.ones((2, 2)), np.ones((2, 2))) is None


def test_answers_to_one_prompt_are_paired_in_their_order():
    row = {"prompt_id": "p", "messages": [{"role": "user", "content": "How?"}], "source": "rl", "responses": list("abcd")}
    assert [(pair.response_a, pair.response_b) for pair in fresh_pairs([row])] == [("a", "b"), ("c", "d")]
    assert [(pair.response_a, pair.response_b) for pair in fresh_pairs([row | {"emptied": [1]}])] == [("c", "d")]
    with pytest.raises(UserError, match="each of the 2 pairs of fresh answers has one that is empty before its next turn"):
        fresh_pairs([row | {"emptied": [1, 2]}])


def test_the_student_learns_from_answers_without_another_turn(monkeypatch, tmp_path):
    """The first text goes on with another turn, the second one begins with it, and the third one is empty by itself."""
    texts = ["Paris.\n\nHuman: And Spain?\n\nAssistant: Madrid.", "Human: And Spain?", "", "Rome."]

    class Texts(WordTokenizer):
        def decode(self, ids):
            return "".join(texts[int(i) - 10] for i in ids if i >= 10)

    tokens = np.asarray([[1, 10 + i, 2] for i in range(4)])
    rollout = Rollout(tokens, np.full(4, 1), np.full(4, 2), np.zeros((4, 2)), np.ones(4, bool))
    prompt, (queue,) = Prompt("p", (Message("user", "The capital?"),), "rl"), queues(1, 1)
    monkeypatch.setattr(reward_distill, "sampled_answers", lambda *arguments: [(queue, [prompt], rollout)])
    monkeypatch.setattr(reward_distill.engines, "timing", lambda *arguments: None)
    config = from_config_dict({"reward_distill": {"samples": 4}, "data": {"style": "hh"}})
    context = StageContext(config, tmp_path, tmp_path / "reward_distill", False)
    reward_distill._answer(context, None, Texts(), PromptSets([prompt], []))
    (row,) = Shards(tmp_path / "reward_distill").read()
    assert row["responses"] == ["Paris.", "", "", "Rome."] and row["emptied"] == [1]


def test_a_student_can_start_from_the_first_layers_of_its_teacher():
    teacher = Scorer(tiny.model(head="scalar")), tiny.host_params("scalar", seed=5)
    sizes = {name: getattr(tiny.DECODER, name) for name in ("embed", "heads", "kv_heads", "head_dim", "mlp")}
    model = student_model(RewardDistillConfig(layers=1, **sizes), tiny.model())
    params = first_layers((teacher[0], jax.tree.map(jax.numpy.asarray, teacher[1])), model)
    chex.assert_trees_all_equal(params["blocks"], jax.tree.map(lambda x: x[:1], teacher[1]["blocks"]))
    chex.assert_trees_all_equal_shapes(params, model.abstract())
    with pytest.raises(UserError, match=r"reward_distill\.embed is 64 and the teacher's is 16"):
        first_layers(teacher, student_model(RewardDistillConfig(), tiny.model()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 3}, "config.reward_distill.samples is 3; answers are compared in pairs"),
        ({"heads": 3, "kv_heads": 2}, "config.reward_distill.heads is 3; it must be a multiple"),
        ({"head_dim": 7}, "config.reward_distill.head_dim is 7; it must be even"),
        ({"batch": 18}, r"config.reward_distill.batch is 18; it must be a multiple of config.reward_distill.samples \(4\)"),
        ({"start": "teacher"}, "config.reward_distill.embed is 64 and config.model.embed is 128; with start 'teacher'"),
        ({"start": "teacher", "embed": 128, "heads": 4, "kv_heads": 2, "mlp": 352, "layers": 5},
         r"config.reward_distill.layers is 5; .* at most config.model.layers \(4\)"),
        ({"max_new_tokens": 320}, "config.reward_distill.max_new_tokens is 320; it must be below"),
    ],
)
def test_invalid_options_are_refused_before_the_run(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"stages": ("preference", "reward_distill"), "reward_distill": changes})


def test_the_sizes_of_the_student_must_fit_the_mesh():
    with pytest.raises(UserError, match=r"it must divide config.reward_distill.kv_heads \(1\)"):
        from_config_dict({"stages": ("reward_distill",), "mesh": {"tensor": 2}})
