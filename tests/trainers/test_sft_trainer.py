"""SFT as a library object: in memory, in a directory, resumed, and with adapters."""

from __future__ import annotations

import dataclasses
import itertools

import chex
import jax
import numpy as np
import pytest

from jaxalign.config import Optimizer
from jaxalign.data.chat import styles
from jaxalign.errors import UserError
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.sft import SFT, held_out_loss, packed
from tests import tiny
from tests.trainers.small import EXAMPLES, language_model, tokenizer

pytestmark = pytest.mark.medium

FIELDS = {
    "epochs": 4,
    "batch_rows": 2,
    "row_length": 48,
    "checkpoint_every": 2,
    "optimizer": Optimizer(learning_rate=1e-2, schedule="constant"),
}


def run(steps: int | None = None, **options) -> tuple[SFT, list]:
    trainer = SFT(language_model(), **FIELDS, **options)
    return trainer, list(itertools.islice(trainer.fit(EXAMPLES), steps))


@pytest.fixture(scope="module")
def whole():
    return run()


def test_training_lowers_the_loss_and_leaves_the_given_model_unchanged(whole):
    trainer, steps = whole
    assert [step.number for step in steps] == list(range(len(steps))) and len(steps) > 4
    assert steps[-1].metrics["loss"] < steps[0].metrics["loss"] - 0.1
    pairs = ((row["prompt"], row["response"]) for row in EXAMPLES)
    rows, cut = packed(tokenizer(), ((language_model().messages(p), r) for p, r in pairs), "plain", 48)
    before = held_out_loss(language_model().model, language_model().weights, rows, 2)
    assert cut == 0 and held_out_loss(trainer.policy.model, trainer.policy.weights, rows, 2) < before - 0.1


def test_the_loss_of_the_first_step_is_the_mean_over_its_answer_tokens():
    """By the softmax over the vocabulary, one answer token at a time."""
    trainer = SFT(language_model(), **FIELDS | {"batch_rows": 1, "epochs": 1})
    step = next(iter(trainer.fit(EXAMPLES[:1])))
    model, words = language_model(), tokenizer()
    prompt = model.prompt_ids(EXAMPLES[0]["prompt"])
    ids = np.asarray([*prompt, *styles.encode_answer(words, EXAMPLES[0]["response"], "plain")])
    logits = tiny.all_logits(model.model, model.params, ids[None])[0]
    logprobs = jax.nn.log_softmax(logits.astype(np.float32))
    expected = -np.mean([logprobs[t - 1, ids[t]] for t in range(len(prompt), len(ids))])
    assert step.metrics["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_directory_and_an_interruption_change_nothing(whole, tmp_path):
    trainer, steps = whole
    run(steps=4, directory=tmp_path)
    again, rest = run(directory=tmp_path)
    assert [step.number for step in rest][-1] == len(steps) - 1 and 0 < rest[0].number <= 4
    assert rest == steps[rest[0].number :]
    chex.assert_trees_all_equal(tiny.to_host(again.policy.params), tiny.to_host(trainer.policy.params))
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [step.metrics["loss"] for step in steps]


def test_a_directory_of_another_run_is_refused(tmp_path):
    run(steps=1, directory=tmp_path)
    with pytest.raises(UserError, match=r"a run with different settings \(epochs was 4 and is 5\); give the same values"):
        SFT(language_model(), **FIELDS | {"epochs": 5}, directory=tmp_path).fit(EXAMPLES)
    with pytest.raises(UserError, match="which contains a run with different data"):
        SFT(language_model(), **FIELDS, directory=tmp_path).fit(EXAMPLES[1:])


@pytest.mark.parametrize("lora", [False, True])
def test_a_directory_of_a_run_from_another_model_is_refused(lora, tmp_path):
    """Otherwise fit would go on with the weights of the earlier run, and would not use the given model."""
    model = language_model(lora)
    SFT(model, **FIELDS, directory=tmp_path).fit(EXAMPLES)
    SFT(language_model(lora), **FIELDS, directory=tmp_path).fit(EXAMPLES)
    others = [model.with_params(jax.tree.map(lambda x: x + 1, model.params))]
    if lora:
        others.append(dataclasses.replace(model, frozen=jax.tree.map(lambda x: 2 * x, model.frozen)))
    for other in others:
        with pytest.raises(UserError, match="which contains a run with different model; give the same values to resume it"):
            SFT(other, **FIELDS, directory=tmp_path).fit(EXAMPLES)


def test_new_adapters_that_another_device_rounds_differently_do_not_make_another_model(tmp_path):
    model = language_model(lora=True)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(model.params)]
    assert any(path.endswith(".a") for path in paths)
    SFT(model, **FIELDS, directory=tmp_path).fit(EXAMPLES)
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, x: x * (1 + 1e-6) if jax.tree_util.keystr(path, simple=True, separator=".").endswith(".a") else x,
        model.params,
    )
    SFT(model.with_params(rounded), **FIELDS, directory=tmp_path).fit(EXAMPLES)


def test_the_policy_can_be_read_while_training_runs():
    trainer = SFT(language_model(), **FIELDS)
    policies = [trainer.policy for _ in trainer.fit(EXAMPLES)]
    chex.assert_tree_all_finite([policy.params["embedding"] for policy in policies])


def test_adapters_are_trained_on_an_unchanged_base():
    model = language_model(lora=True)
    trainer = SFT(model, **FIELDS)
    losses = [step.metrics["loss"] for step in trainer.fit(EXAMPLES)]
    assert losses[-1] < losses[0] and set(trainer.policy.params) == set(model.params)
    assert trainer.policy.frozen is model.frozen


def test_texts_and_whole_dialogues_can_be_rows():
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "It is red."}]
    for rows in (["It is red."], [{"messages": messages}]):
        steps = list(SFT(language_model(), **FIELDS | {"epochs": 1}).fit(rows))
        assert np.isfinite([step.metrics["loss"] for step in steps]).all()


def test_a_trainer_that_has_not_trained_has_no_policy():
    with pytest.raises(UserError, match=r"SFT has not trained yet; iterate over SFT.fit\(...\) first"):
        SFT(language_model()).policy  # noqa: B018


@pytest.mark.parametrize(("fields", "message"), [
    ({"epochz": 2}, "SFT.epochz is not a field of SFT; did you mean epochs"),
    ({"epochs": 0}, "SFT.epochs is 0; it must be at least 1"),
    ({"learning_rate": 1.0}, "SFT.learning_rate is not a field of SFT; did you mean SFT.optimizer.learning_rate"),
    ({"seed": -1}, r"SFT\(seed\) is -1; it must be between 0 and 4294967295"),
])
def test_invalid_settings_are_refused_with_a_sentence(fields, message):
    with pytest.raises(UserError, match=message):
        SFT(language_model(), **fields)


def test_an_object_that_is_not_a_language_model_is_refused():
    message = r"SFT\(model\) is .FOLDER. of type str; a LanguageModel, as load_model returns it, is expected"
    with pytest.raises(UserError, match=message):
        SFT("FOLDER")


def test_a_diverged_run_does_not_end_as_if_all_were_well():
    """With this learning rate the parameters overflow in the first steps."""
    optimizer = Optimizer(learning_rate=1e30, schedule="constant", warmup_steps=0)
    trainer = SFT(language_model(), **FIELDS | {"optimizer": optimizer, "epochs": 30})
    with pytest.raises(UserError, match=r"the gradients of 10 steps in a row, up to step \d+, are not finite"):
        list(trainer.fit(EXAMPLES))


LONG = "Name the colour red. " * 40


def test_pitfall_28_a_row_whose_response_would_be_cut_entirely_is_refused_by_number():
    rows = [EXAMPLES[0], {"prompt": LONG, "response": "yes"}, EXAMPLES[1], {"prompt": LONG, "response": "yes"}]
    with pytest.raises(UserError, match=r"SFT.fit\(rows\): 2 of 4 rows would lose their whole response, because row_length is "
                                        r"48 and their prompts have \d+ tokens or more; .*\(numbers from 0: 1, 3\)"):
        SFT(language_model(), **FIELDS).fit(rows)


@pytest.mark.parametrize("row", [
    {"prompt": "the cat", "response": ""}, {"prompt": "the cat", "response": " \n"},
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": ""}]}])
@pytest.mark.parametrize("window", [0, 2])
def test_a_row_whose_response_is_empty_is_refused_by_number(row, window):
    """Only the end token would be learnt from it."""
    with pytest.raises(UserError, match=r"SFT.fit\(rows\)\[1\] has the empty answer '.*', so only the end of an answer would "
                                        "be learnt; remove the row"):
        SFT(language_model(), **FIELDS).fit([EXAMPLES[0], row, EXAMPLES[1]], window=window)


def test_rows_that_are_cut_are_counted_in_a_warning(caplog):
    trainer = SFT(language_model(), **FIELDS)
    next(trainer.fit([*EXAMPLES, {"prompt": "the cat", "response": LONG}]))
    total = len(EXAMPLES) + 1
    assert [record.getMessage() for record in caplog.records] == [
        f"SFT.fit(rows): 1 of {total} rows are longer than row_length (48 tokens) and are cut; raise row_length"
    ]


def test_rows_longer_than_the_model_are_refused_even_if_row_length_allows_them():
    rows = [{"prompt": "the cat", "response": LONG}]
    with pytest.raises(UserError, match=r"SFT.fit\(rows\): a row has 100 tokens, but the model supports at most 64"):
        SFT(language_model(), **FIELDS | {"row_length": 100}).fit(rows)
