"""best_of_n on a tiny run: it picks the answer that the preference model scores best, and later stages train on these
answers."""

from __future__ import annotations

import json
import math
import shutil
from unittest.mock import MagicMock

import numpy as np
import pytest

from jaxalign.config import BestOfNConfig, from_config_dict
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt, Rollout
from jaxalign.stages import best_of_n
from jaxalign.stages.best_of_n import _rows, summarise
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.shards import Shards
from jaxalign.tracking.metrics import read_metrics
from tests.feedback.fakes import WordTokenizer
from tests.small_run import read, rows, run
from tests.tracking.pages import check_links

pytestmark = pytest.mark.slow

STAGES = ("pretrain", "revise", "sft", "compare", "preference", "best_of_n", "evaluate", "report")
SECTION = {"prompts": 12, "n": 4, "batch": 16, "max_new_tokens": 24, "batch_rows": 4, "row_length": 64, "checkpoint_every": 2}


@pytest.fixture(scope="session")
def best(done, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("best")
    for stage in STAGES[:5]:
        shutil.copytree(done / stage, workdir / stage)
    run(workdir, stages=STAGES, best_of_n=SECTION)
    return workdir


@pytest.mark.slow
def test_a_mesh_changes_nothing(done, best, tmp_path):
    for stage in STAGES[:5]:
        shutil.copytree(done / stage, tmp_path / stage)
    run(tmp_path, stages=STAGES[:6], best_of_n=SECTION, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    for mine, other in zip(rows(tmp_path, "best_of_n"), rows(best, "best_of_n"), strict=True):
        assert mine["response"] == other["response"]
        np.testing.assert_allclose(mine["scores"], other["scores"], rtol=1e-3, atol=1e-3)
    found, expected = (read_metrics(workdir / "best_of_n" / "metrics.jsonl") for workdir in (tmp_path, best))
    np.testing.assert_allclose([row["loss"] for row in found], [row["loss"] for row in expected], rtol=1e-4)


def test_every_prompt_has_its_scores_and_its_best_answer(best):
    found = rows(best, "best_of_n")
    assert len({row["prompt_id"] for row in found}) == len(found) == 12
    assert all(len(row["scores"]) == 4 for row in found)
    chosen = [row for row in found if row["response"] is not None]
    assert chosen and all(row["score"] in row["scores"] for row in chosen)
    summary = read(best / "best_of_n" / "summary.json")
    assert (summary["chosen"], summary["n"]) == (len(chosen), 4)
    assert summary["analytic_kl"] == pytest.approx(math.log(4) - 3 / 4)
    scores = np.asarray([row["scores"] for row in found])
    assert summary["expected_best"][0] == pytest.approx(scores.mean(), rel=1e-4)
    assert summary["expected_best"][-1] == pytest.approx(scores.max(axis=1).mean(), rel=1e-4)
    assert read(best / "summary.json")["models"] == ["base", "sft", "best_of_n"]
    assert {"changes", "losses"} <= set(check_links(best / "report.html"))


def test_an_interrupted_stage_ends_the_same(best, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(best, again)
    folder = again / "best_of_n"
    (folder / "rows-00002.jsonl").unlink()
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").unlink()
    (folder / "manifest.json").write_text(json.dumps(read(folder / "manifest.json") | {"status": "running"}))
    run(again, stages=STAGES, best_of_n=SECTION)
    for name in ("rows-00002.jsonl", "metrics.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (best / "best_of_n" / name).read_bytes()


def test_an_unreachable_threshold_is_reported_in_one_sentence(done, tmp_path):
    for stage in STAGES[:5]:
        shutil.copytree(done / stage, tmp_path / stage)
    with pytest.raises(UserError, match=r"none of the 12 prompts .* lower best_of_n\.threshold"):
        run(tmp_path, stages=STAGES, best_of_n=SECTION | {"threshold": 1e6})


def test_the_best_answer_that_ended_is_chosen():
    """By hand: the best of the first four answers was cut off, so the second best is chosen; none of the next four passes."""
    tokens = np.tile(np.asarray([[1, 2, 3, 4]]), (8, 1))
    ended = np.asarray([0, 1, 1, 1, 1, 1, 1, 1], bool)
    rollout = Rollout(tokens, np.full(8, 1), np.full(8, 2), np.zeros((8, 3)), ended)
    prompts = [Prompt(name, (Message("user", "How?"),), "rl") for name in "ab"]
    scores = np.asarray([9.0, 1.0, 5.0, 2.0, -3.0, -4.0, -5.0, -9.0], np.float32)
    found = _rows(prompts, rollout, scores, BestOfNConfig(n=4, threshold=0.0), WordTokenizer(), "compact")
    assert [row["score"] for row in found] == [5.0, None]
    assert found[0]["response"] is not None and found[1]["response"] is None
    free = _rows(prompts, rollout, scores, BestOfNConfig(n=4), WordTokenizer(), "compact")
    assert [row["score"] for row in free] == [5.0, -3.0]


class Texts(WordTokenizer):
    """Each id from 10 on stands for a whole text."""

    def __init__(self, *texts):
        self.texts = texts

    def decode(self, ids):
        return "".join(self.texts[int(i) - 10] for i in ids if i >= 10)


def sampled(*ended):
    """A rollout whose response i is the token 10 + i and, if it ended, the end token."""
    rows = len(ended)
    tokens = np.stack([np.full(rows, 1), 10 + np.arange(rows), np.full(rows, 2)], axis=1)
    return Rollout(tokens, np.full(rows, 1), 1 + np.asarray(ended, int), np.zeros((rows, 2)), np.asarray(ended, bool))


TWO_TURNS = "Paris.\n\nHuman: And Spain?\n\nAssistant: Madrid."


@pytest.mark.parametrize(("style", "texts", "ended", "responses", "notes"), [
    # The best text of each prompt has another turn; that of the second prompt reached the length limit in it.
    ("hh", (TWO_TURNS, "Rome.", "Oslo.\n\nHuman: An", "Rome."), (1, 1, 0, 1), ["Paris.", "Oslo."], [["next_turn"]] * 2),
    # Nothing is said before the next turn of the best text, so the second best is chosen.
    ("hh", ("Human: And Spain?", "Rome.", "\n\nHuman: Hi", "Rome."), (1, 1, 1, 1), ["Rome.", "Rome."], [None, None]),
    ("hh", ("Paris.", "Rome.", "Oslo", "Bern."), (1, 1, 0, 1), ["Paris.", "Bern."], [None, None]),
    # An answer of no words ended by itself.
    ("hh", ("", "Rome.", "Oslo.", "Bern."), (1, 1, 1, 1), ["", "Oslo."], [None, None]),
    ("chat", ("<think>A capital.</think>Paris.", "Rome.", "<think>Oslo", "Bern."), (1, 1, 1, 1), ["Paris.", "Bern."],
     [None, None]),
    ("compact", (TWO_TURNS, "Rome.", "Oslo.\n\nHuman: An", "Bern."), (1, 1, 0, 1), [TWO_TURNS, "Bern."], [None, None]),
])
def test_only_the_answer_in_a_text_is_trained_on(style, texts, ended, responses, notes):
    prompts = [Prompt(name, (Message("user", "The capital?"),), "rl") for name in "ab"]
    scores = np.asarray([2.0, 1.0, 2.0, 1.0], np.float32)
    found = _rows(prompts, sampled(*ended), scores, BestOfNConfig(n=2), Texts(*texts), style)
    assert [row["response"] for row in found] == responses and [row.get("notes") for row in found] == notes
    assert [row["scores"] for row in found] == [[2.0, 1.0]] * 2


def test_the_chosen_answers_that_were_cut_are_counted(tmp_path, capsys):
    context = StageContext(from_config_dict({}), tmp_path, tmp_path / "best_of_n", False)
    assert best_of_n._count_cut(context, [{"response": "a"}]) == 0 and not capsys.readouterr().out
    assert best_of_n._count_cut(context, [{"response": "a"}, {"response": "b", "notes": ["next_turn"]}]) == 1
    assert capsys.readouterr().out == "[best_of_n] 1 of 2 chosen answers were cut at the next turn\n"


def test_the_expected_best_is_the_mean_over_subsets():
    found = summarise([{"scores": [1.0, 2.0, 6.0]}], 3)
    assert found["expected_best"] == pytest.approx([3.0, (2 + 6 + 6) / 3, 6.0])


def test_prompts_with_too_few_finite_scores_are_left_out_of_the_expected_best():
    """The second prompt has two finite scores and the third none: both would count as 0 among the best of three."""
    nan = float("nan")
    rows = [{"scores": [-1.0, -2.0, -6.0]}, {"scores": [-4.0, nan, -8.0]}, {"scores": [nan, float("inf"), nan]}]
    assert summarise(rows, 3)["expected_best"] == pytest.approx([(-3 - 6) / 2, ((-1 - 1 - 2) / 3 - 4) / 2, -1.0])
    assert summarise(rows[2:], 3)["expected_best"] == [None] * 3


def test_chosen_answers_that_are_cut_are_counted_in_the_log(tmp_path, capsys, monkeypatch):
    """Seven words exceed a row of 8 tokens with the markers of the dialogue and the eos; one word does not."""
    config = from_config_dict({"best_of_n": {"row_length": 8, "n": 2}, "data": {"style": "hh"}})
    context = StageContext(config, tmp_path, tmp_path / "best_of_n", False)
    row = {"prompt_id": "a", "messages": [{"role": "user", "content": "Hi"}], "source": "rl", "score": 1, "scores": [1, 0]}
    Shards(context.directory).write(0, [row | {"response": "w " * 7}, row | {"response": "w"}])
    for name in ("run_models", "_choose", "policy_inputs"):
        monkeypatch.setattr(best_of_n, name, MagicMock())
    best_of_n.run_models.load_tokenizer.return_value = WordTokenizer()
    trained = []
    monkeypatch.setattr(best_of_n, "train_supervised", lambda *arguments: trained.append(arguments[-1]()))
    best_of_n.BestOfNStage().run(context)
    assert trained[0]["cut"] == 1
    assert capsys.readouterr().out == ("[best_of_n] warning: 1 of 2 chosen answers, with their prompts, are cut to "
                                       "best_of_n.row_length (8 tokens); raise it\n")


def test_a_small_share_of_prompts_with_a_chosen_answer_is_warned_about_or_stops_the_stage(tmp_path, capsys):
    context = StageContext(from_config_dict({"best_of_n": {"threshold": 0.5}}), tmp_path, tmp_path / "best_of_n", False)
    best_of_n._check_share(context, 100, 50)
    assert not capsys.readouterr().out
    best_of_n._check_share(context, 100, 5)
    assert capsys.readouterr().out.startswith("[best_of_n] warning: only 5 of 100 prompts have a complete answer that scores "
                                              "at least 0.5; lower best_of_n.threshold")
    with pytest.raises(UserError, match=r"config.best_of_n.required_share is 0.05, but only 4 of 100 rows \(4.0%\)"):
        best_of_n._check_share(context, 100, 4)
    with pytest.raises(UserError, match="none of the 100 prompts has a complete answer that scores at least 0.5"):
        best_of_n._check_share(context, 100, 0)
