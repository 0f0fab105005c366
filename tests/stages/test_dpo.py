"""dpo and online_dpo on a tiny run: their inputs and outputs, and that an interruption changes nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from jaxalign.config import DPOConfig, from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.language_model import load_model
from jaxalign.records import Comparison, Message, Prompt, Rollout
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.labelled import answered, labelled_split
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.answers import answer_pairs, oriented, pair_arrays
from jaxalign.trainers.direct import DPO
from jaxalign.trainers.online_direct import minibatches
from jaxalign.trainers.sft import SFT
from tests.small_run import CONFIG, phases_with_operations, read, run
from tests.tracking.pages import check_links

pytestmark = pytest.mark.slow

PROMPTS = [Prompt(f"p{i}", (Message("user", text),), "compare") for i, text in enumerate(("How do I use it?", "And sage?"))]
STAGES = ("pretrain", "revise", "sft", "compare", "dpo", "online_dpo", "evaluate", "report")
CHANGES = {
    "stages": STAGES,
    # The supervised term is needed in a batch without a decided pair: the gradient would be only rounding, which Adam scales to
    # full steps.
    "dpo": {"batch": 8, "epochs": 2, "max_length": 192, "held_out_share": 0.2, "checkpoint_every": 2, "sft_weight": 0.5},
    "online_dpo": {"iterations": 3, "batch": 8, "prompts": 16, "max_new_tokens": 24, "checkpoint_every": 2,
                   "temperature": 0.9},
}


@pytest.fixture(scope="session")
def direct(done, tmp_path_factory):
    """A finished run of both stages on the earlier stages of the shared run."""
    workdir = tmp_path_factory.mktemp("direct")
    for stage in STAGES[:4]:
        shutil.copytree(done / stage, workdir / stage)
    run(workdir, **CHANGES)
    return workdir


def pair(label: float, prompt: int = 0) -> Comparison:
    return Comparison(PROMPTS[prompt], "It is good.", "You fool.", label)


@pytest.fixture(scope="session")
def tokenizer(done) -> Tokenizer:
    return load_tokenizer(done / "pretrain" / "tokenizer.model")


@pytest.mark.slow
def test_both_stages_train_and_are_evaluated(direct):
    steps = read(direct / "dpo" / "summary.json")["steps"]
    assert len(read_metrics(direct / "dpo" / "metrics.jsonl")) == steps > 0
    assert len(read_metrics(direct / "online_dpo" / "metrics.jsonl")) == 3
    summary = read(direct / "summary.json")
    assert summary["models"] == ["base", "sft", "dpo", "online_dpo"]
    assert abs(summary["kl"]["sft"]) < 1e-3 < abs(summary["kl"]["online_dpo"])
    last = [json.loads(line) for line in (direct / "online_dpo" / "rows-00002.jsonl").read_text().splitlines()]
    assert len(last) == 8 and all(0 <= row["label"] <= 1 for row in last)
    # The answers end with a stop token only: 2 answers per pair.
    ended = read_metrics(direct / "online_dpo" / "metrics.jsonl")[-1]["eos_rate"]
    assert ended == pytest.approx(1 - sum(len(row.get("incomplete", ())) for row in last) / 16)
    assert "Online direct preference optimisation" in (direct / "report.html").read_text(encoding="utf-8")
    assert {"changes", "dpo", "online_dpo"} <= set(check_links(direct / "report.html"))


def test_their_phases_have_operations(direct):
    assert phases_with_operations(direct / "dpo") == {"score", "train"}
    assert phases_with_operations(direct / "online_dpo") == {"generate", "label", "score", "update"}


def test_online_pairs_are_sampled_by_the_trained_policy(direct):
    """The gap is measured at the sampling temperature of 0.9; the trainer's own log-probabilities are at temperature 1."""
    (check,) = read(direct / "online_dpo" / "summary.json")["checks"]
    assert check["name"] == "sampler gap" and check["passed"] and 0 < check["value"] < 1e-4


def test_a_sampler_gap_stops_the_run_if_configured(direct, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(direct, again, ignore=shutil.ignore_patterns("online_dpo", "evaluate", "report"))
    changes = {"sampler_tolerance": 1e-12, "checks": {"sampler_gap": "stop"}}
    with pytest.raises(UserError, match="online_dpo: check 'sampler gap' is .*config.online_dpo.checks.sampler_gap is 'stop'"):
        run(again, **CHANGES | {"stages": STAGES[:6], "online_dpo": CHANGES["online_dpo"] | changes})


def test_the_policy_of_the_first_step_equals_its_reference(direct):
    for stage in ("dpo", "online_dpo"):
        first = read_metrics(direct / stage / "metrics.jsonl")[0]
        assert abs(first["margin"]) < 1e-3, stage


@pytest.mark.slow
def test_a_mesh_does_not_change_dpo(direct, tmp_path):
    """`test_placements.py` has online_dpo on meshes."""
    for stage in STAGES[:4]:
        shutil.copytree(direct / stage, tmp_path / stage)
    run(tmp_path, **CHANGES | {"stages": STAGES[:5], "mesh": {"data": 2, "fsdp": 2, "tensor": 2}})
    found, expected = (read_metrics(workdir / "dpo" / "metrics.jsonl") for workdir in (tmp_path, direct))
    assert len(found) == len(expected)
    for name in ("loss", "margin", "chosen_reward", "rejected_reward", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in found], [r[name] for r in expected], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("stage", ["dpo", "online_dpo"])
def test_an_interrupted_stage_ends_in_the_same_metrics_with_another_interval_of_checkpoints(direct, tmp_path, stage):
    again = tmp_path / "again"
    shutil.copytree(direct, again)
    folder = again / stage
    newest = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    shutil.rmtree(folder / "checkpoints" / str(newest))
    manifest = read(folder / "manifest.json") | {"status": "running"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run(again, **CHANGES | {stage: CHANGES[stage] | {"checkpoint_every": 1}})
    assert (folder / "metrics.jsonl").read_bytes() == (direct / stage / "metrics.jsonl").read_bytes()


def test_the_better_answer_comes_first():
    turned = oriented(pair(0.2))
    assert (turned.response_a, turned.response_b, turned.label) == ("You fool.", "It is good.", 0.8)
    assert oriented(pair(0.7)) == pair(0.7)


def test_arrays_hold_prompt_and_answer_by_length(tokenizer):
    found = pair_arrays(tokenizer, [pair(0.2)], "compact", DPOConfig())
    for side, text in enumerate(("You fool.", "It is good.")):
        start, end = found.prompt_length[0, side], found.length[0, side]
        assert tokenizer.decode(found.tokens[0, side, start : end - 1].tolist()) == text
        assert found.tokens[0, side, end - 1] == tokenizer.eos_id
    np.testing.assert_allclose(found.label, [0.8])


def test_a_long_dialogue_keeps_its_end(tokenizer):
    whole = pair_arrays(tokenizer, [pair(1.0)], "compact", DPOConfig())
    short = pair_arrays(tokenizer, [pair(1.0)], "compact", DPOConfig(max_length=int(whole.length[0, 0]) - 2))
    cut = whole.prompt_length[0, 0] - short.prompt_length[0, 0]
    assert cut > 0
    end = short.length[0, 0]
    np.testing.assert_array_equal(short.tokens[0, 0, :end], whole.tokens[0, 0, cut : cut + end])


def test_kto_pairs_each_answer_with_an_answer_to_another_prompt(tokenizer):
    found = pair_arrays(tokenizer, [pair(0.9), pair(0.1, prompt=1)], "compact", DPOConfig(objective="kto"), single=True)
    np.testing.assert_allclose(found.label, [0.9, 0.1, 0.9, 0.1], atol=1e-6)

    def text(i, side):
        return tokenizer.decode(found.tokens[i, side, found.prompt_length[i, side] : found.length[i, side] - 1].tolist())

    assert [text(i, 0) for i in range(4)] == ["It is good.", "You fool.", "You fool.", "It is good."]
    # Each answer gets the next answer to the other prompt, which is the first of the pair after its own.
    assert [text(i, 1) for i in range(4)] == ["You fool.", "You fool.", "It is good.", "It is good."]
    np.testing.assert_array_equal(found.prompt_length[:, 0], found.prompt_length[:, 1])


def test_kto_skips_answers_to_the_same_prompt(tokenizer):
    """Neighbouring pairs may share a prompt; a single prompt has no mismatched answer."""
    pairs = [pair(0.9), pair(0.9), pair(0.9, prompt=1)]
    found = pair_arrays(tokenizer, pairs, "compact", DPOConfig(objective="kto"), single=True)
    assert found.label.shape == (6,)
    with pytest.raises(UserError, match="all answers are to one prompt"):
        pair_arrays(tokenizer, pairs[:2], "compact", DPOConfig(objective="kto"), single=True)


def test_online_pairs_put_the_better_answer_first_and_dropped_pairs_have_weight_0():
    rollout = Rollout(np.arange(24).reshape(6, 4), np.ones(6, int), np.full(6, 2), np.zeros((6, 2)), np.ones(6, bool))
    labelled = [Comparison(PROMPTS[0], "a", "b", 0.9), Comparison(PROMPTS[0], "a", "b", 0.1),
                Comparison(PROMPTS[0], "a", "b", 0.5, decided=False)]
    found = answer_pairs(rollout, labelled, "drop")
    np.testing.assert_array_equal(found.tokens[:2, :, 0], [[0, 4], [12, 8]])
    np.testing.assert_allclose(found.label, [0.9, 0.9, 0.5])
    np.testing.assert_array_equal(found.weight, [1, 1, 0])
    np.testing.assert_array_equal(answer_pairs(rollout, labelled, "half").weight, [1, 1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "robust"}, "label_smoothing is 0"),
        ({"objective": "aot", "micro_batch_tokens": 1024}, "sorts the whole batch"),
        ({"objective": "kto"}, "trains on single answers"),
        ({"objective": "sigmod"}, "sigmoid"),
        ({"objective": "simpo", "label_smoothing": 0.1}, "no effect when config.dpo.objective is 'simpo'"),
    ],
)
def test_incompatible_options_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(CONFIG | {"stages": STAGES, "dpo": {"max_length": 192} | changes})


@pytest.mark.slow
def test_iterative_dpo_visits_each_pair_once_per_epoch_with_the_reference_of_its_iteration(direct, tmp_path):
    workdir = tmp_path / "iterative"
    for stage in (*STAGES[:4], "dpo"):
        shutil.copytree(direct / stage, workdir / stage)
    changed = CHANGES["online_dpo"] | {"epochs": 2, "minibatches": 2, "reference": "iteration"}
    run(workdir, **(CHANGES | {"online_dpo": changed, "stages": STAGES[:6]}))
    # The first iteration has the same policy as the plain run: samples and labels are equal, but for the rounding of labels,
    # because sampling has two parts here.
    texts = [(stage / "online_dpo" / "rows-00000.jsonl").read_text() for stage in (workdir, direct)]
    first, plain = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert first == [
        {name: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value for name, value in row.items()}
        for row in plain
    ]
    rows = read_metrics(workdir / "online_dpo" / "metrics.jsonl")
    assert len(rows) == 3 and all(np.isfinite(row["loss"]) for row in rows)
    config = from_config_dict(CONFIG | CHANGES | {"online_dpo": changed})
    visits = list(minibatches(config.online_dpo, config.seed, 0))
    assert len(visits) == 4 and sorted(np.concatenate(visits[:2])) == sorted(np.concatenate(visits[2:])) == list(range(8))
    assert not np.array_equal(visits[0], visits[2])


@pytest.mark.parametrize(
    ("dpo", "message"),
    [
        ({"objective": "sigmoid+kto"}, "'kto' cannot be part of a sum"),
        ({"objective": "sigmoid+ipo", "weights": (1.0,)}, "weights has 1 entries"),
        ({"objective": "sigmoid+ipo", "weights": (1.0, -1.0)}, "at least 0"),
        ({"weights": (1.0,)}, "is not a sum"),
        ({"objective": "ipo+exo_pair"}, "'exo_pair' needs it above 0"),
    ],
)
def test_an_invalid_sum_of_objectives_is_refused(dpo, message):
    with pytest.raises(UserError, match=message):
        from_config_dict({"stages": ("dpo",), "dpo": dpo})


def library_metrics(trainer, data, stage: str, workdir) -> None:
    """Assert that the steps of a trainer object have the metrics of the stage's metric file."""
    steps = list(trainer.fit(data))
    expected = read_metrics(workdir / stage / "metrics.jsonl")
    assert [{"step": step.number} | step.metrics for step in steps] == expected


def test_the_trainers_of_the_library_compute_the_same_as_the_stages(direct):
    config = resolve_auto(from_config_dict(CONFIG | CHANGES))
    context = StageContext(config, direct, direct / "dpo", False)
    base, policy = load_model(direct / "pretrain"), load_model(direct / "sft")
    examples, _, _ = answered(context, base.tokenizer)
    library_metrics(SFT(base, seed=config.seed, **dataclasses.asdict(config.sft)), examples, "sft", direct)
    pairs, _, _ = labelled_split(context, base.tokenizer, context.config.dpo)
    library_metrics(DPO(policy, seed=config.seed, **dataclasses.asdict(config.dpo)), pairs, "dpo", direct)
