"""The first section of the report: results, the models that took part, the rows, and the meaning of the numbers."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from .pages import render_page
from .synthetic import STAGES, make_run, write_json, write_rows


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return render_page(make_run(tmp_path_factory.mktemp("full")))


def test_lead_summarises_the_run_with_counts(full):
    _, page = full
    lead = page.text("lead")
    assert ("The helpful-only model gave the requested help for 156 of 200 harmful requests (78%); the model after "
            "supervised CAI for 24 (12%), and the model after RL for 9 (4.5%).") in lead
    # 93.0 (88.6 to 95.8) and 91.5 (86.8 to 94.6) overlap; 61.0 and 97.5 do not
    assert "right help 93% of the time before and 91.5% after, a difference within noise." in lead
    assert "courteous 61% of the time before and 97.5% after." in lead
    assert "All 4 run-time checks of RL passed." in lead
    assert re.search(r"Harmful help 78% → before, then 4\.5% better", lead)
    assert re.search(r"Helpful 93% → before, then 91\.5% no clear change", lead)


@pytest.mark.parametrize(("models", "ending"), [
    (("base",), "requests (78%)."),
    (("base", "sft"), "(78%); the model after supervised CAI for 24 (12%)."),
    (("base", "sft", "ppo", "round-2/ppo"),
     "CAI for 24 (12%), the model after RL for 9 (4.5%), and the model after RL, round 2 for 9 (4.5%)."),
])
def test_the_rates_of_all_models_are_one_list(tmp_path, models, ending):
    run = make_run(tmp_path)
    _change(run / "summary.json", lambda summary: summary.update(
        models=models, rates={model: summary["rates"][model.removeprefix("round-2/")] for model in models}))
    assert ending in render_page(run)[1].text("lead")


def _change(path, change):
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def test_the_models_that_took_part_are_named(full):
    lead = full[1].text("lead")
    assert "The base model (“helpful-only”) was trained by stage pretrain of this run; it answered the prompts of stage" in lead
    assert "The model after supervised CAI wrote the pairs of answers of stage compare." in lead
    assert "The base model criticised and revised its own answers, labelled the pairs of answers and decided the win" in lead
    assert "and its scores were the reward of RL. The prompts come from the embedded world" in lead


@pytest.mark.parametrize(("judge", "feedback", "shown"), [
    ({}, "mine.py:Judge", "Your judge mine.py:Judge criticised and revised the base model's answers, labelled the pairs of "
                          "answers and decided the win rates."),
    ({"revise": "cheap.py:J", "evaluate": "other.py:J"}, "local",
     "Your judge cheap.py:J criticised and revised the base model's answers. The base model labelled the pairs of answers. "
     "Your judge other.py:J decided the win rates."),
    ({"compare": "model", "path": ["/m/large"]}, "mine.py:Judge", "The model /m/large labelled the pairs of answers."),
    ({"compare": "model", "path": ["a", "b", "c"]}, "local", "A jury of the models a, b and c labelled the pairs of answers."),
])
def test_each_judge_is_named_with_its_work(tmp_path, judge, feedback, shown):
    run = make_run(tmp_path)
    _change(run / "config.json", lambda config: (config["feedback"].update(judge=feedback), config.update(judge=judge)))
    lead = render_page(run)[1].text("lead")
    assert shown in lead and "Feedback followed the constitution “default”." in lead


def test_the_model_and_the_files_of_a_users_run_are_named(tmp_path):
    run = make_run(tmp_path, STAGES[1:], gold=False)
    data = {"source": "prompts_jsonl", "red_team": "in/red.jsonl", "helpful": "in/help.csv", "rl": "", "eval": "in/eval.jsonl"}
    _change(run / "config.json", lambda config: config.update(model={"source": "huggingface", "path": "models/m"}, data=data))
    files = [{"path": "in/red.jsonl", "rows": 2312, "prompts": 2310, "broken": [], "duplicates": [7, 9], "evaluated": [1] * 116,
              "in_red_team": [], "unit": "line"}]
    _change(run / "revise" / "summary.json", lambda summary: summary.update(data={"files": files}))
    lead = render_page(run)[1].text("lead")
    assert "The base model (“starting model”) is models/m; it answered the prompts of stage revise." in lead
    assert ("Data: red.jsonl (prompts whose answers are revised), help.csv (prompts that are answered without revision) and "
            "eval.jsonl (prompts for evaluation only).") in lead
    assert ("Of the 2,312 rows of in/red.jsonl, 2,310 (99.9%) were kept; 2 (0.1%) with the dialogue of an earlier row, "
            "dropped.") in lead
    assert "in/red.jsonl: 2,312 rows, 2,310 prompts kept (116 used only for evaluation)." in lead


def test_the_lead_counts_usable_rows_and_explains_the_others(full):
    lead = full[1].text("lead")
    assert "23 of 25 answers and revisions can be trained on; left out: 2 empty (the text is empty)." in lead
    assert "Fine-tuning used 22 answers and 1 were held out to measure the loss." in lead
    # 1000 - 78 - 31 - 2
    assert ("889 of 1,000 pairs have a decided label; the others: 78 undecided (the label is too close to 0.5), "
            "31 identical (the two answers are equal), 2 refused (the judge declined to answer).") in lead
    assert "Warning" not in lead


def test_missing_verdicts_are_counted_in_the_lead_and_in_the_table_of_the_judge(tmp_path):
    run = make_run(tmp_path)
    _change(run / "compare" / "summary.json", lambda summary: summary.update(requests=72, problems={"none": 24}))
    page = render_page(run)[1]
    assert "24 of 72 verdicts are missing: 24 none (the judge returned None)." in page.text("lead")
    assert "Missing verdicts 24 (33.3%) none: the judge returned None" in page.text("labels")


def test_training_that_diverges_is_a_warning_at_the_beginning(tmp_path):
    run = make_run(tmp_path)
    write_rows(run / "sft" / "metrics.jsonl", [{"step": n, "loss": loss} for n, loss in enumerate((2.86, 4499.0, 1151.0))])
    assert ("Warning: stage sft, step 2. The mean loss of 3 steps rose to 1884, from 2.86 at the first step. Training "
            "diverges: lower optimizer.learning_rate of this stage") in render_page(run)[1].text("lead")


def test_few_usable_rows_are_warnings_at_the_beginning(tmp_path):
    run = make_run(tmp_path)
    few = {"total": 25, "usable": 7, "reasons": {"cut_off": 18}}
    _change(run / "revise" / "summary.json", lambda summary: summary.update(usable=few))
    _change(run / "compare" / "summary.json", lambda summary: summary.update(outcomes={"identical": 950}))
    assert render_page(run)[1].text("lead").startswith(
        "What happened Warning: only 7 rows can be trained on, fewer than sft.min_rows (8): raise "
        "revise.max_new_tokens, start from a model that ends its answers, or set sft.keep to ('unchanged', 'cut_off'). "
        "Warning: only 50 of 1,000 pairs have a decided label: raise compare.temperature. The helpful-only model gave")


def test_all_models_are_side_by_side_without_rates(tmp_path):
    run = make_run(tmp_path, gold=False)
    path = run / "evaluate" / "rows-00000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for index, row in enumerate(rows):
        row["tokens"] = 20 + 2 * (index % 2)
    write_rows(path, rows)
    lead = render_page(run)[1].text("lead")
    assert "All models, on the same 16 prompts; win rates on 180 of them." in lead
    assert ("Model Win rate against base KL to sft, nats per response Length, tokens "
            "Preference score before normalisation helpful-only") in lead
    # Half of 16 lengths are 20 and half 22: standard deviation sqrt(16 / 15), 1.96 of it / 4 = 0.506 around the summary's mean
    assert "helpful-only (base) - 8.21 8.21 to 8.21 24.1 23.6 to 24.6 -0.92" in lead
    assert "after supervised CAI (sft) 78.3% 71.8 to 83.7 0.00 0.00 to 0.00 22.3 21.8 to 22.8 0.01" in lead
    assert "after RL (ppo) - 2.95 2.95 to 2.95 22.9 22.4 to 23.4 1.31" in lead


def test_the_preference_model_of_round_1_is_named_in_a_run_of_rounds(tmp_path):
    run = make_run(tmp_path, gold=False)
    _change(run / "config.json", lambda config: config.update(rounds=2))
    scores = {"base": -0.5, "sft": -1.0, "ppo": -1.96, "round-2/ppo": -1.58}
    _change(run / "summary.json", lambda summary: summary.update(models=list(scores), preference_score=scores))
    assert ("The mean score before normalisation that the preference model of round 1 gives to the answers of the model after "
            "RL, round 2 rose to -1.58 from -1.96 for the model after RL") in render_page(run)[1].text("lead")


def test_a_conflict_of_preference_model_and_judge_is_stated(tmp_path):
    run = make_run(tmp_path, gold=False)
    lost = {"model": "ppo", "against": "sft", "wins": 61, "total": 160, "undecided": 0, "rate": 0.38125, "low": 0.3096,
            "high": 0.4583}
    _change(run / "summary.json", lambda summary: summary.update(win_rates=[lost]))
    lead = render_page(run)[1].text("lead")
    assert ("The preference model scores the answers of the model after RL higher than those of the model after supervised "
            "CAI, but the judge prefers the model after supervised CAI (win rate of the model after RL 38.1%, 95% interval 31% "
            "to 45.8%): the preference model may have been exploited.") in lead
    _change(run / "summary.json", lambda summary: summary.update(win_rates=[lost | {"high": 0.51}]))
    lead = render_page(run)[1].text("lead")
    assert "exploited" not in lead and "(95% interval 31% to 51%), which is no clear preference." in lead


def test_win_rates_without_verdicts_are_no_draw(tmp_path):
    run = make_run(tmp_path, gold=False)
    tied = {"model": "ppo", "against": "sft", "wins": 10, "total": 200, "undecided": 180, "rate": 0.5, "low": 0.4314,
            "high": 0.5686, "outcomes": {"unreadable": 170, "tie": 10}}
    _change(run / "summary.json", lambda summary: summary.update(win_rates=[tied]))
    page = render_page(run)[1]
    assert page.text("lead").startswith(
        "What happened Warning: the judge gave no verdict on 170 of 200 pairs of the model after RL and the model after "
        "supervised CAI, and each counts as a tie: 170 unreadable (the answer is none of the options, or most of its "
        "probability lies outside of them). ")
    sentence = "of 200 comparisons (95% interval 43.1% to 56.9%), which is no clear preference"
    assert f"{sentence}; the judge gave no verdict on 170 of them, and each counts as a tie." in page.text("lead")
    assert "180 undecided, 170 of them without a verdict, each counted as half a win." in page.text("wins")
    few = tied | {"outcomes": {"unreadable": 1, "tie": 179}}
    _change(run / "summary.json", lambda summary: summary.update(win_rates=[few]))
    lead = render_page(run)[1].text("lead")
    assert "Warning" not in lead and "; the judge gave no verdict on 1 of them" in lead
    few = tied | {"outcomes": {"tie": 180}}
    _change(run / "summary.json", lambda summary: summary.update(win_rates=[few]))
    assert "no verdict" not in render_page(run)[1].text("lead")


def test_the_losses_of_a_run_without_evaluation_are_explained(tmp_path):
    lead = render_page(make_run(tmp_path, ("pretrain", "sft", "report")))[1].text("lead")
    assert "the mean cross-entropy, in nats per token, of the first step and of the last 10 steps" in lead


@pytest.mark.parametrize("gold", [True, False])
def test_the_numbers_of_the_lead_are_explained_by_sections_of_the_documentation(tmp_path, gold):
    lead = render_page(make_run(tmp_path, gold=gold))[1].text("lead").partition("What these numbers mean")[2]
    places = re.findall(r"\(docs/([\w/]+\.md)(?:, “([^”]+)”)?\)", lead)
    assert len(places) >= 6
    for page, heading in places:
        content = (pathlib.Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
        assert not heading or re.search(rf"^#+ {re.escape(heading)}$", content, re.MULTILINE), (page, heading)


def test_inverted_labels_are_mentioned(tmp_path):
    run = make_run(tmp_path)
    config = json.loads((run / "config.json").read_text())
    config["feedback"]["invert"] = True
    write_json(run / "config.json", config)
    assert "The labels were inverted" in render_page(run)[1].text("lead")
