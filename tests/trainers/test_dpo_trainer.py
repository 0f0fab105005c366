"""DPO as a library object: every objective, pairs and judged answers, in memory and in a directory."""

from __future__ import annotations

import itertools
import math

import chex
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.registry.objectives import OBJECTIVES
from jaxalign.trainers.direct import DPO
from tests import tiny
from tests.compilations import SEEN
from tests.trainers.small import JUDGED, PAIRS, language_model

pytestmark = pytest.mark.medium

FIELDS = {
    "batch": 4,
    "epochs": 4,
    "max_length": 48,
    "checkpoint_every": 2,
    "optimizer": {"learning_rate": 5e-3, "schedule": "constant", "warmup_steps": 0},
}


def run(objective: str = "sigmoid", data=PAIRS, steps: int | None = None, **options):
    trainer = DPO(language_model(), objective, **(FIELDS | options))
    return trainer, list(itertools.islice(trainer.fit(data), steps))


@pytest.fixture(scope="module")
def whole():
    return run()


def test_a_second_run_with_equal_settings_has_the_programs_of_the_first(whole):
    count = len(SEEN)
    _, steps = run(steps=2)
    assert SEEN[count:] == [] and steps == whole[1][:2]


def test_training_makes_the_policy_prefer_the_chosen_answers(whole):
    _, steps = whole
    assert steps[0].metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)  # The policy equals its reference.
    assert steps[-1].metrics["accuracy"] == 1 and steps[-1].metrics["margin"] > 0


def test_a_directory_and_an_interruption_change_nothing(whole, tmp_path):
    trainer, steps = whole
    run(steps=3, directory=tmp_path)
    again, rest = run(directory=tmp_path)
    assert rest == steps[rest[0].number :] and rest[0].number > 0
    chex.assert_trees_all_equal(tiny.to_host(again.policy.params), tiny.to_host(trainer.policy.params))
    assert len(list(tmp_path.glob("reference-train-*.npy"))) == 1


SUMMABLE = [name for name in OBJECTIVES.builtin if OBJECTIVES.get(name).summable]
ALONE = [name for name in OBJECTIVES.builtin if name not in SUMMABLE]


@pytest.mark.parametrize("objective", SUMMABLE)
def test_every_objective_is_accepted(objective):
    smoothing = {"label_smoothing": 0.1} if OBJECTIVES.get(objective).smoothing_required else {}
    assert DPO(language_model(), objective, **(FIELDS | smoothing)).section.objective == objective


@pytest.mark.variants(2)
@pytest.mark.parametrize("objective", [*ALONE, "+".join(SUMMABLE)])
def test_every_objective_takes_a_step(objective):
    """Objectives that can be summed take it together, in one program: their sum is finite only if each of them is."""
    smoothing = {"label_smoothing": 0.1} if "+" in objective else {}
    _, steps = run(objective, steps=1, epochs=1, **smoothing)
    assert np.isfinite(steps[0].metrics["loss"]) and steps[0].metrics["skipped"] == 0


def test_kto_trains_on_judged_answers():
    _, steps = run("kto", JUDGED)
    assert steps[-1].metrics["loss"] < steps[0].metrics["loss"]


def test_adapters_are_trained_with_their_base_as_reference():
    trainer = DPO(language_model(lora=True), **FIELDS)
    steps = list(trainer.fit(PAIRS))
    assert steps[0].metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[-1].metrics["loss"] < steps[0].metrics["loss"]


def test_judged_answers_need_an_objective_for_single_answers():
    with pytest.raises(UserError, match="objective 'sigmoid' learns from pairs; set objective to 'kto'"):
        DPO(language_model()).fit(JUDGED)


@pytest.mark.parametrize(("objective", "fields", "message"), [
    ("sigmid", {}, "DPO.objective is 'sigmid'"),
    ("robust", {}, "DPO.label_smoothing is 0; objective 'robust' needs it above 0"),
    ("kto+sigmoid", {}, "'kto' cannot be part of a sum"),
    ("sigmoid+ipo", {"weights": (1.0,)}, "DPO.weights has 1 entries"),
    ("aot", {"micro_batch_tokens": 512}, "objective 'aot' sorts the whole batch"),
    ("sigmoid", {"beta": 0.0}, "DPO.beta is 0.0; it must be above 0"),
])
def test_invalid_options_are_refused(objective, fields, message):
    with pytest.raises(UserError, match=message):
        DPO(language_model(), objective, **fields)


LONG = "It is red. " * 60


def test_pairs_that_differ_only_beyond_the_cut_are_refused_by_number():
    rows = [PAIRS[0], {"prompt": "Why?", "chosen": LONG + "Yes.", "rejected": LONG + "No."}]
    reason = r"the answers of 1 of 2 pairs differ only in tokens that are cut, since max_length is 48.*numbers from 0: 1\)"
    with pytest.raises(UserError, match=reason):
        DPO(language_model(), **FIELDS | {"max_length": 48}).fit(rows)


def test_cut_answers_are_counted_in_a_warning(caplog):
    rows = [*PAIRS, {"prompt": "Why?", "chosen": LONG, "rejected": "No."}]
    trainer = DPO(language_model(), **FIELDS | {"max_length": 48})
    next(trainer.fit(rows))
    assert trainer.cut == 1
    assert [record.getMessage() for record in caplog.records] == [
        "pairs: 1 of 14 prompts with an answer are longer than max_length (48 tokens) and are cut; raise max_length"
    ]


def test_pairs_longer_than_the_model_are_refused():
    rows = [{"prompt": "Why?", "chosen": LONG, "rejected": "No."}] * 2
    with pytest.raises(UserError, match=r"DPO.fit\(pairs\): a row has 96 tokens, but the model supports at most 64"):
        DPO(language_model(), **FIELDS | {"max_length": 96}).fit(rows)


def test_judged_answers_may_come_from_a_generator_or_a_data_frame():
    rows = [{"prompt": f"Is it {answer}?", "completion": answer, "label": label}
            for answer, label in (("Yes.", True), ("No.", False))]
    frame = pytest.importorskip("pandas").DataFrame(rows)

    def trainer():
        return DPO(language_model(), objective="kto", epochs=1, batch=2)

    expected = trainer()._records(rows, "pairs")
    assert [one.desirable for one in expected] == [True, False]
    assert trainer()._records(iter(rows), "pairs") == trainer()._records(frame, "pairs") == expected
    trainer().fit(frame, window=2)
