"""Wrong calls of the whole Python API raise one clear exception, which names the argument."""

from __future__ import annotations

import concurrent.futures
import threading
import traceback

import numpy as np
import pytest

import jaxalign as ja
from jaxalign.feedback.judge import Text, Verdict
from tests import bad_calls
from tests.folders import write_model
from tests.trainers.small import EXAMPLES, PAIRS

CALLS = [line for name, text in vars(bad_calls).items() if name.startswith("CALLS") for line in text.strip().splitlines()]
FAILING_REWARDS = {
    "None": lambda prompts, responses, **columns: None,
    "an exception": lambda prompts, responses, **columns: [1.0 / 0],
    "text": lambda prompts, responses, **columns: ["1"] * len(responses),
}


class Brief:
    """A judge that prefers the first answer, without ratings."""

    def critique(self, requests, draw):
        return [Text("long") for _ in requests]

    def revise(self, requests, draw):
        return [Text(request.response) for request in requests]

    def compare(self, requests, draw):
        return [Verdict(0.9) for _ in requests]


def zero(prompts, responses, **columns):
    return [0.0] * len(responses)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The values that the calls name."""
    tmp = tmp_path_factory.mktemp("calls")
    folder, file = write_model(tmp / "FOLDER"), tmp / "FILE"
    file.write_text("not a folder")
    p = ja.load_model(folder)
    reward_model = ja.RewardModel(p, epochs=1, batch=2)
    for _ in reward_model.fit(PAIRS):
        pass
    sampler = ja.Sampler(p, batch=4)
    return {
        "ja": ja, "np": np, "tmp": tmp, "F": folder, "FILE": file, "Brevity": Brief, "f": zero, "p": p, "EXAMPLES": EXAMPLES,
        "PAIRS": PAIRS, "adapted": ja.load_model(folder, lora=ja.Lora(rank=2, alpha=4.0)), "s": sampler,
        "roll": sampler.rollout(["a"], 4), "judge": ja.Judge(Brief(), ["Be brief."], reasoning=False), "rm": reward_model,
        "sft": lambda **fields: ja.SFT(p, **{"epochs": 1, "batch_rows": 2, "row_length": 64} | fields),
        "dpo": lambda **fields: ja.DPO(p, **{"epochs": 1, "batch": 2} | fields),
        "rewarding": lambda **fields: ja.RewardModel(p, **{"epochs": 1, "batch": 2} | fields),
        "ppo": lambda reward, **fields: ja.PPO(
            p, reward, **{"iterations": 1, "batch": 4, "max_new_tokens": 4, "minibatches": 1, "epochs": 1} | fields
        ),
    }


@pytest.mark.parametrize("line", CALLS)
def test_a_wrong_call_raises_one_clear_exception(line, names):
    call, words = line.split(" :: ")
    with pytest.raises((ja.UserError, ValueError, TypeError)) as raised:
        eval(call, dict(names))
    assert words in str(raised.value)
    if not isinstance(raised.value, ja.UserError):
        assert "/jaxalign/" in traceback.extract_tb(raised.value.__traceback__)[-1].filename


@pytest.mark.medium
def test_numpy_numbers_and_paths_are_accepted_where_numbers_and_texts_are(names):
    p, tmp = names["p"], names["tmp"]
    ja.Mesh(data=np.int64(1)), ja.Lora(rank=np.int32(2), alpha=np.float32(4))
    ja.load_model(str(names["F"]), max_length=np.int64(64), seed=np.uint32(2**32 - 1), dtype=np.dtype("float32"))
    plain, counted = (
        ja.Sampler(p, temperature=kind(1), batch=integer(4), seed=integer(3)).generate(["a"], integer(4), integer(2))
        for kind, integer in ((float, int), (np.float32, np.int64))
    )
    assert plain.ids == counted.ids
    trainer = names["sft"](epochs=np.int64(1), seed=np.int32(5), directory=tmp / "run", trackers=None)
    assert [step.number for step in trainer.fit(EXAMPLES)] and (tmp / "run" / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_created_is_named(names):
    with pytest.raises(ja.UserError, match=r"(directory|folder)\b.*/proc/nowhere.*give another folder"):
        names["sft"](directory="/proc/nowhere/run").fit(EXAMPLES)
    with pytest.raises(ja.UserError, match="/proc/nowhere.*give another folder"):
        names["p"].save("/proc/nowhere/model")


def test_threads_take_turns_on_one_sampler(names):
    prompts, count = ["Once upon a time", "The dog"], 8
    alone = ja.Sampler(names["p"], batch=4)
    expected = [alone.generate(prompts, 8, 2).ids for _ in range(count)]
    shared, start = ja.Sampler(names["p"], batch=4), threading.Barrier(4)

    def sample(number: int):
        if number < 4:
            start.wait()
        return shared.generate(prompts, 8, 2).ids

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(sample, range(count)))
    assert sorted(found) == sorted(expected)


def test_an_exception_of_a_reward_function_names_its_line_and_is_the_cause_of_the_error(names, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def boom(prompts, responses, **columns):
        return [1 / 0 for _ in responses]

    line = boom.__code__.co_firstlineno + 1
    message = rf"boom gave no score for 4 of 4 .*boom raised ZeroDivisionError at .*test_bad_calls\.py:{line}: division by zero"
    with pytest.raises(ja.UserError, match=message) as raised:
        list(names["ppo"](boom).fit(["a"]))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("kind", FAILING_REWARDS)
def test_the_message_of_a_failing_reward_speaks_only_of_what_the_caller_can_change(kind, names, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ja.UserError, match="gave no score for 4 of 4 responses") as raised:
        list(names["ppo"](FAILING_REWARDS[kind]).fit(["a"]))
    assert not any(word in str(raised.value) for word in ("checkpoint", "config.", "max_dropped_share"))


def test_a_damaged_record_of_a_run_is_refused(names):
    folder = names["tmp"] / "damaged"
    folder.mkdir()
    for content in ("", "[[[", "5", '{"seed": 0'):
        (folder / "trainer.json").write_text(content)
        with pytest.raises(ja.UserError, match="trainer.json cannot be read"):
            names["sft"](directory=folder).fit(EXAMPLES)
