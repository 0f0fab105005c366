"""Warnings about training that changes little."""

from __future__ import annotations

import optax
import pytest

from jaxalign.config import Mesh, Optimizer, PPOConfig, PreferenceConfig
from jaxalign.data.loader import EpochLoader, InOrder
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from jaxalign.records import Message, Prompt
from jaxalign.trainers.direct import DPO
from jaxalign.trainers.extent import RL, SUPERVISED, rate_warning, read_share, rows_warning, schedule_warning
from jaxalign.trainers.reward_model import RewardModel
from jaxalign.trainers.rows import compared_texts
from jaxalign.trainers.sft import SFT
from tests.trainers.small import EXAMPLES, PAIRS, language_model


def test_steps_that_read_less_than_half_of_the_rows_are_told():
    assert read_share(50_000, 8, 10) == pytest.approx(0.0016) and read_share(10, 8, 10) == 1.0
    said = rows_warning(EpochLoader(50_000, 8, 0), 10)
    assert said == "training reads 80 of 50,000 rows (0.2%); raise steps or epochs to read more"
    assert rows_warning(EpochLoader(160, 8, 0), 10) is None and rows_warning(EpochLoader(161, 8, 0), 10) is not None
    assert rows_warning(InOrder(8), 1) is None


@pytest.mark.parametrize(("optimizer", "steps", "said"), [
    (Optimizer(learning_rate=0), 20, "the learning rate is 0, so no weight changes"),
    (Optimizer(warmup_steps=500), 20, "the warm-up has 500 steps but training 20, so the learning rate reaches only 4.0% of "
                                      "its peak; lower warmup_steps"),
    (Optimizer(warmup_steps=10), 9, None), (Optimizer(), 1, None), (optax.sgd(0.0), 1, None),
])
def test_a_schedule_that_hardly_changes_the_weights_is_told(optimizer, steps, said):
    assert schedule_warning(optimizer, steps) == said


def model_of(layers: int, embed: int, adapters: bool = False) -> Model:
    config = DecoderConfig(vocab=1000, layers=layers, embed=embed, heads=8, kv_heads=8, head_dim=embed // 8, mlp=4 * embed)
    return Model(config, "lm", make_sharding(Mesh()), LoraAdapters(2, 4.0, ("*",)) if adapters else None)


# 12 * layers * embed^2 weights: 1.6 million, 38 million and 6.4 billion.
@pytest.mark.parametrize(("model", "rate", "rates", "usual"), [
    (model_of(8, 128), 10.0, SUPERVISED, "0.001"), (model_of(8, 128), 1e-2, SUPERVISED, None),
    (model_of(8, 128), 2e-3, RL, "0.00015"), (model_of(8, 128), 1.5e-3, RL, None),
    (model_of(12, 512), 2e-3, SUPERVISED, "0.0001"), (model_of(12, 512), 1e-3, SUPERVISED, None),
    (model_of(32, 4096), 5e-4, SUPERVISED, "1e-05"), (model_of(32, 4096), 1e-4, SUPERVISED, None),
    (model_of(32, 4096, adapters=True), 2e-4, SUPERVISED, None),
    (model_of(32, 4096, adapters=True), 2e-3, SUPERVISED, "0.0001"),
    (model_of(32, 4096), 1.5e-4, RL, "1e-06"), (model_of(32, 4096), 1e-5, RL, None),
])
def test_a_rate_more_than_ten_times_the_usual_one_is_told(model, rate, rates, usual):
    said = rate_warning(Optimizer(learning_rate=rate), model, rates)
    assert said is None if usual is None else f"the learning rate is {rate:g}, but about {usual} is usual for " in said
    assert rate_warning(optax.sgd(rate), model, rates) is None
    assert rate_warning(Optimizer(kind="adafactor", learning_rate=rate), model, rates) is None


def test_the_usual_rates_are_the_defaults_of_small_models():
    """The table of docs/python.md: `RewardModel` and `PPO`."""
    assert (PreferenceConfig().optimizer.learning_rate, PPOConfig().optimizer.learning_rate) == (SUPERVISED.small, RL.small)


@pytest.mark.medium
def test_a_trainer_tells_both_before_its_first_step(caplog):
    trainer = SFT(language_model(), steps=1, batch_rows=1, row_length=48, optimizer=Optimizer(learning_rate=0.0))
    next(trainer.fit(EXAMPLES * 4))
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("[SFT] training reads 1 of ") and said[1] == "[SFT] the learning rate is 0, so no weight changes"


def test_held_out_rows_that_are_also_trained_on_are_told(caplog):
    trainer = SFT(language_model(), epochs=1, batch_rows=1, row_length=48)
    trainer.fit(EXAMPLES[:4], EXAMPLES[2:5])
    assert [record.getMessage() for record in caplog.records] == [
        "[SFT.fit] 2 of the 3 rows of held_out are also rows to train on, so the held-out measures are too good; remove them "
        "from one of the two"]
    caplog.clear()
    SFT(language_model(), epochs=1, batch_rows=1, row_length=48).fit(EXAMPLES[:4], EXAMPLES[4:])
    assert not caplog.records


def test_held_out_rows_are_compared_by_their_texts(caplog):
    """The rows to train on come from an iterator, and those held out have another form."""
    def messages(row: dict, key: str) -> list[dict]:
        return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": f" {row[key]}"}]

    SFT(language_model(), epochs=1, batch_rows=1, row_length=48).fit(
        iter(EXAMPLES[:4]), {"messages": [messages(row, "response") for row in EXAMPLES[2:]]})
    DPO(language_model(), epochs=1, batch=1, max_length=48).fit(
        iter(PAIRS[:3]), [{"chosen": messages(row, "rejected"), "rejected": messages(row, "chosen")} for row in PAIRS[2:]])
    RewardModel(language_model(), members=1, epochs=1, batch=1).fit(iter(PAIRS[:2]), {k: [v] for k, v in PAIRS[0].items()})
    assert [record.getMessage().split(", so")[0] for record in caplog.records] == [
        f"[SFT.fit] 2 of the {len(EXAMPLES) - 2} rows of held_out are also rows to train on",
        f"[DPO.fit] 1 of the {len(PAIRS) - 2} rows of held_out are also rows to train on",
        "[RewardModel.fit] 1 of the 1 rows of held_out are also rows to train on"]


def test_the_texts_of_prompts_without_their_columns_are_compared():
    asked = Prompt("a", (Message("user", "Hi."),), "x", {"gold": 1})
    assert compared_texts(asked) == compared_texts(Prompt("b", (Message("user", "Hi. "),), "y"))
    assert compared_texts(asked) != compared_texts(Prompt("a", (Message("user", "Ho."),), "x"))
    assert compared_texts((None, "Hi.")) != compared_texts(((Message("user", "Hi."),), ""))
