"""The results of an evaluation for each value of a column of its prompts. Expected means are worked out by hand."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.stages.shared.breakdown import Contest, breakdown, grouping_columns
from tests.folders import write_model

pytestmark = pytest.mark.slow

JUDGE = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "judge.py"
LABELS = ("safe", "safe", "unsafe")


def row(model, number, tokens, complete=True, score=None):
    return {"model": model, "prompt_id": f"p{number}", "columns": {"label": LABELS[number], "id": number}, "tokens": tokens,
            "complete": complete, "score": score}


def pair(number, label):
    prompt = Prompt(f"p{number}", (Message("user", str(number)),), "eval", {"label": LABELS[number], "id": number})
    return Comparison(prompt, "later", "earlier", label)


def test_each_value_has_its_own_means_and_win_rates():
    rows = [row("base", 0, 4, score=1.0), row("base", 1, 8, False, score=2.0), row("base", 2, 5, score=-1.0),
            row("ppo", 0, 2, score=3.0), row("ppo", 1, 3, score=4.0), row("ppo", 2, 9, False, score=0.0)]
    found = breakdown(rows, ("base", "ppo"), [Contest("ppo", "base", [pair(0, 0.9), pair(1, 0.1)])])
    assert list(found) == ["label"] and list(found["label"]) == ["safe", "unsafe"]
    safe, unsafe = found["label"].values()
    assert (safe["prompts"], unsafe["prompts"]) == (2, 1)
    assert safe["length"] == {"base": 6.0, "ppo": 2.5} and unsafe["length"] == {"base": 5.0, "ppo": 9.0}
    assert safe["complete"] == {"base": 0.5, "ppo": 1.0} and unsafe["complete"] == {"base": 1.0, "ppo": 0.0}
    assert safe["preference_score"] == {"base": 1.5, "ppo": 3.5}
    (won,) = safe["win_rates"]
    assert [won[name] for name in ("model", "against", "wins", "total", "rate")] == ["ppo", "base", 1, 2, 0.5]
    assert unsafe["win_rates"] == []  # Its prompt is not among those compared.


def test_answers_without_scores_have_no_preference_score():
    found = breakdown([row("base", number, 1) for number in range(3)], ("base",), [])
    assert set(found["label"]["safe"]) == {"prompts", "length", "complete", "win_rates"}


@pytest.mark.parametrize(("values", "expected"), [
    (["a", "b"], ["x"]), (["a", "a"], []), ([1, 2], []), (["a", None], []), ([str(i % 12) for i in range(30)], ["x"]),
    ([str(i % 13) for i in range(30)], []), ([], [])])
def test_a_column_of_few_strings_groups_the_prompts(values, expected):
    assert grouping_columns([{"x": value} for value in values]) == expected
    assert grouping_columns([{} for _ in values]) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("columns")
    write_model(root / "model")
    (root / "rl.txt").write_text("".join(f"the cat sat {i} times, why?\n" for i in range(8)))
    (root / "eval.csv").write_text("prompt,label\n" + "".join(f'"say, {i}",{"un" * (i % 2)}safe\n' for i in range(6)))
    (root / "plain.txt").write_text("".join(f"say, {i}\n" for i in range(6)))
    return root


def run(folder, name, **evaluate):
    config = from_config_dict({
        "stages": ("ppo", "evaluate", "report"), "compile_cache": None,
        "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "style": "chat", "rl": str(folder / "rl.txt"), "eval": str(folder / name)},
        "feedback": {"judge": f"{JUDGE}:Brevity"}, "reward": {"source": "ai_feedback"},
        "ppo": {"iterations": 1, "batch": 8, "minibatches": 1, "prompts": 8, "max_new_tokens": 8,
                "checks": {"step_zero": False}},
        "evaluate": {"batch": 8, "max_new_tokens": 8, "win_rate_prompts": 5} | evaluate,
    })
    workdir = folder / f"run-{name}"
    pipeline.run(config, workdir)
    return json.loads((workdir / "summary.json").read_text()), (workdir / "report.html").read_text(encoding="utf-8")


def test_the_columns_of_the_evaluation_file_are_in_the_summary_and_the_report(folder):
    summary, page = run(folder, "eval.csv")
    found = summary["by_column"]["label"]
    assert {value: results["prompts"] for value, results in found.items()} == {"safe": 3, "unsafe": 3}
    assert {value: results["win_rates"][0]["total"] for value, results in found.items()} == {"safe": 3, "unsafe": 2}
    for model in ("base", "ppo"):
        assert sum(results["length"][model] for results in found.values()) / 2 == pytest.approx(summary["length"][model])
    assert sum(results["win_rates"][0]["wins"] for results in found.values()) == summary["win_rates"][0]["wins"]
    assert "Results by column of the prompts" in page


def test_a_file_without_columns_adds_nothing(folder):
    summary, page = run(folder, "plain.txt", texts=str(folder / "rl.txt"))
    assert "by_column" not in summary and "Results by column" not in page
    # The texts of evaluate.texts join the differences of the answers.
    assert set(summary["text_loss"]) == {"base", "ppo"} and {"length", "text_loss"} <= set(summary["paired"]["ppo"])
    assert "Loss on plain text, nats per token" in page and "Correct choice" not in page
