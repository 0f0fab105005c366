"""TRL trains on exported sets and exported models without a change of columns, and on the tokens that jaxalign trains on."""

from __future__ import annotations

import json

import pytest

from jaxalign import convert, export
from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import load_run_tokenizer
from jaxalign.records import Message
from tests.finished_run import write_run

pytestmark = pytest.mark.parity
datasets = pytest.importorskip("datasets")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

SHARED = dict(max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
              gradient_checkpointing=False, disable_tqdm=True, learning_rate=1e-2)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(the work directory, its config, a folder with the sets as "data" and the models of stages sft and preference)."""
    folder = tmp_path_factory.mktemp("trl")
    workdir, config = write_run(folder)
    assert export.main(["export", str(workdir), f"--out={folder / 'data'}"]) == 0
    for stage in ("sft", "preference"):
        assert convert.main(["convert", f"--source={workdir / stage}", f"--target={folder / stage}"]) == 0
    datasets.disable_progress_bars()
    return workdir, config, folder


def loaded(exported, name):
    folder = exported[2]
    return datasets.load_dataset(str(folder / "data"), name, split="train", cache_dir=str(folder / "cache"))


def moved(trainer) -> bool:
    """Whether two steps of training change the weights to finite ones."""
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    after = list(trainer.model.parameters())
    assert trainer.state.global_step == 2 and all(bool(torch.isfinite(weight).all()) for weight in after)
    return any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


def policy(exported):
    return transformers.AutoModelForCausalLM.from_pretrained(exported[2] / "sft", dtype=torch.float32)


def tokenizer(exported, stage):
    return transformers.AutoTokenizer.from_pretrained(exported[2] / stage)


def messages(turns):
    return tuple(Message(turn["role"], turn["content"]) for turn in turns)


def test_the_dpo_trainer_trains_on_the_pairs_with_the_tokens_of_the_run(exported, tmp_path):
    rows = loaded(exported, "preference")
    trainer = trl.DPOTrainer(policy(exported), args=trl.DPOConfig(output_dir=str(tmp_path), **SHARED), train_dataset=rows,
                             processing_class=tokenizer(exported, "sft"))
    own = load_run_tokenizer(exported[1], exported[0])
    for theirs, row in zip(trainer.train_dataset, rows, strict=True):
        prompt = styles.encode_prompt(own, messages(row["prompt"]), "chat")
        assert theirs["prompt_ids"] == prompt
        for side in ("chosen", "rejected"):
            answer = styles.encode_answer(own, row[side][0]["content"], "chat")
            # The template writes a line break after the end of the turn, which jaxalign leaves out.
            assert theirs[f"{side}_ids"][: len(answer)] == answer and len(theirs[f"{side}_ids"]) <= len(answer) + 1
    assert moved(trainer)


def test_the_reward_trainer_trains_an_exported_reward_model_on_the_pairs(exported, tmp_path):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported[2] / "preference", dtype=torch.float32)
    arguments = trl.RewardConfig(output_dir=str(tmp_path), **SHARED)
    assert moved(trl.RewardTrainer(model, args=arguments, train_dataset=loaded(exported, "preference"),
                                   processing_class=tokenizer(exported, "preference")))


def test_the_sft_trainer_trains_on_the_answers_alone(exported, tmp_path):
    rows = loaded(exported, "sft")
    trainer = trl.SFTTrainer(policy(exported), args=trl.SFTConfig(output_dir=str(tmp_path), **SHARED), train_dataset=rows,
                             processing_class=tokenizer(exported, "sft"))
    own = load_run_tokenizer(exported[1], exported[0])
    for theirs, row in zip(trainer.train_dataset, rows, strict=True):
        prompt = styles.encode_prompt(own, messages(row["prompt"]), "chat")
        ids, trained = theirs["input_ids"], [label != -100 for label in theirs["labels"]]
        assert ids[: len(prompt)] == prompt
        assert trained == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert moved(trainer)


def test_the_card_of_a_model_has_front_matter_that_the_hub_reads(exported):
    from huggingface_hub import ModelCard

    card = ModelCard.load(exported[2] / "preference" / "README.md")
    assert card.data.pipeline_tag == "text-classification" and card.data.library_name == "transformers"
    accuracy = json.loads((exported[0] / "preference" / "summary.json").read_text())["held_out"]["accuracy"]
    assert f"| accuracy on held-out pairs | {100 * accuracy:.1f}% | 40.9 to 92.9% | 8 |" in card.text
