"""The report and the final table state only what the manifests and summaries of a run record."""

from __future__ import annotations

import json

import pytest

from jaxalign.errors import UserError
from jaxalign.pipeline.running import read_results
from jaxalign.storage import LocalStorage
from jaxalign.tracking.report.usable import row_sentences, warnings
from jaxalign.tracking.workdir import read_run

from .pages import render_page
from .synthetic import STAGES, make_run, write_json, write_rows


def change(path, **values):
    content = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, content | values)


def lead(run):
    return render_page(run)[1].text("lead")


FROM_FILE = {"source": "preferences_jsonl", "train": "in/pairs.jsonl"}


def test_revisions_that_fine_tuning_did_not_read_are_not_credited(tmp_path):
    run = make_run(tmp_path)
    change(run / "config.json", data=FROM_FILE)
    change(run / "sft" / "manifest.json", inputs={"pretrain": "hash"})
    shown = lead(run)
    assert "after supervised CAI" not in shown and "helpful-only" not in shown
    assert "Fine-tuning imitated the preferred answers of the data." in shown
    assert "Warning: no stage trained on the rows of stage revise; sft, preference and ppo used other data." in shown
    assert "23 of 25 answers and revisions" not in shown and "Data: pairs.jsonl (preferences)." in shown
    assert "after supervised CAI" not in read_results(LocalStorage(run), STAGES).table()


def test_recorded_revisions_are_credited(tmp_path):
    run = make_run(tmp_path)
    assert "Fine-tuning imitated the revisions and answers of stage revise." in lead(run)
    assert "no stage trained" not in lead(run)
    assert "after supervised CAI (sft)" in read_results(LocalStorage(run), STAGES).table()


def test_stages_of_an_earlier_run_with_other_options_are_left_out(tmp_path):
    run = make_run(tmp_path)
    stages = ["pretrain", "sft", "preference", "ppo", "evaluate", "report"]
    change(run / "config.json", stages=stages, data=FROM_FILE)
    for stage in ("revise", "compare"):
        change(run / stage / "manifest.json", config={"data": {"source": "world"}})
    change(run / "sft" / "manifest.json", inputs={"pretrain": "hash"})
    change(run / "preference" / "manifest.json", inputs={"sft": "hash"})
    shown = lead(run)
    assert "criticised" not in shown and "labelled" not in shown and "stage compare" not in shown
    assert "The preference model was trained on the comparisons of the data" in shown
    assert not {"revisions", "labels"} & set(render_page(run)[1].sections)


def test_human_pairs_are_counted_apart_from_labels(tmp_path):
    run = make_run(tmp_path)
    change(run / "preference" / "summary.json", train_pairs=150, ai={"train_pairs": 120},
           human={"train_pairs": 30, "files": []})
    assert ("The preference model was trained on 120 of these labels and 30 of the human comparisons of preference.human (100 "
            "more were held out to measure its accuracy), and its scores were the reward of RL.") in lead(run)


@pytest.mark.parametrize(("reward", "shown"), [
    ({"source": "verifier", "verifier": "exact_match"}, "The reward of RL was the verifier exact_match."),
    ({"source": "callable", "callable": "mine.py:score"}, "The reward of RL was the function mine.py:score."),
    ({"source": "distilled"}, "The reward of RL was the score of the student of the preference model."),
    ({"source": "preference+callable", "callable": "m:f"},
     "The reward of RL was the sum of the score of the preference model and the function m:f."),
])
def test_the_reward_of_rl_is_named(tmp_path, reward, shown):
    run = make_run(tmp_path)
    change(run / "config.json", reward=reward)
    assert shown in lead(run) and "and its scores were the reward of RL" not in lead(run)


@pytest.mark.parametrize(("share", "shown", "warned"), [(0.002, "0.2%", True), (0.75, "75.0%", False)])
def test_a_stage_that_read_a_part_of_its_rows_is_named(tmp_path, share, shown, warned):
    run = make_run(tmp_path)
    assert not any("steps of stage sft" in sentence for sentence in row_sentences(read_run(run)))
    change(run / "sft" / "summary.json", steps=10, read_share=share)
    found = read_run(run)
    assert f"The 10 steps of stage sft read {shown} of its rows." in row_sentences(found)
    warning = f"Warning: stage sft read only {shown} of its rows; raise its steps or epochs."
    assert (warning in warnings(found)) == warned


@pytest.mark.parametrize(("share", "said"), [(0.75, True), (0.25, False)])
def test_scores_that_were_mostly_replaced_are_told(tmp_path, share, said):
    run = make_run(tmp_path)
    change(run / "config.json", ppo={"missing_eos": "replace"})
    write_rows(run / "ppo" / "metrics.jsonl", [{"step": step, "score_changed": share} for step in (1, 2)])
    sentence = "But ppo.missing_eos (replace) changed the scores of 75.0% of the responses, which have no stop token."
    assert (sentence in lead(run)) == said


@pytest.mark.parametrize(("inputs", "summary", "shown"), [
    (["sft", "compare"], {}, "the labels of stage compare"), (["sft"], {}, "the comparisons of the data"),
    (["sft"], {"balance": {"desirable": 3, "undesirable": 2, "ratio": 1.5}}, "the judged answers of the data"),
])
def test_the_data_of_dpo_are_named(tmp_path, inputs, summary, shown):
    run = make_run(tmp_path, ("sft", "compare", "evaluate", "report"), gold=False)
    change(run / "config.json", stages=["sft", "compare", "dpo", "evaluate", "report"])
    manifest = {"stage": "dpo", "status": "done", "config": {}, "inputs": dict.fromkeys(inputs, "")}
    write_json(run / "dpo" / "manifest.json", manifest)
    write_json(run / "dpo" / "summary.json", {"steps": 3} | summary)
    assert f"DPO learned from {shown}." in lead(run)


def test_answers_that_mostly_did_not_end_are_a_warning(tmp_path):
    run = make_run(tmp_path)
    change(run / "config.json", compare={"max_new_tokens": 64})
    change(run / "compare" / "summary.json", pairs=1000, identical_pairs=200, incomplete=1200)
    warning = ("Warning: 1,200 of 1,600 compared answers did not end within compare.max_new_tokens (64), but training treats "
               "them as complete; raise it, or start from a model that ends its answers.")
    page = render_page(run)[1]
    assert warning in page.text("lead") and "Answers that did not end 1,200 (75.0%)" in page.text("labels")


def test_answers_of_online_dpo_that_did_not_end_are_told(tmp_path):
    run = make_run(tmp_path, ("sft", "evaluate", "report"), gold=False)
    change(run / "config.json", stages=["sft", "online_dpo", "evaluate", "report"])
    write_json(run / "online_dpo" / "manifest.json", {"stage": "online_dpo", "status": "done", "config": {}, "inputs": {}})
    write_json(run / "online_dpo" / "summary.json", {"iterations": 2, "pairs": 8})
    write_rows(run / "online_dpo" / "metrics.jsonl", [{"step": step, "loss": 0.7, "eos_rate": 0.25} for step in (0, 1)])
    sentence = "75.0% of the answers of the last iteration of online DPO did not end within online_dpo.max_new_tokens."
    assert sentence in lead(run)


def test_an_implicit_reward_that_is_no_better_than_chance_is_a_warning(tmp_path):
    run = make_run(tmp_path, ("sft", "compare", "evaluate", "report"), gold=False)
    change(run / "config.json", stages=["sft", "compare", "dpo", "evaluate", "report"])
    write_json(run / "dpo" / "manifest.json", {"stage": "dpo", "status": "done", "config": {}, "inputs": {"sft": ""}})
    held_out = {"pairs": 100, "accuracy": 0.49, "low": 0.394, "high": 0.587, "margin": 0.01}
    write_json(run / "dpo" / "summary.json", {"steps": 3, "held_out": held_out})
    interval = "49.0% (95% interval 39.4% to 58.7%)"
    warning = f"Warning: the implicit reward is not reliably better than chance: its held-out accuracy is {interval} on 100"
    _, page = render_page(run)
    assert warning in page.text("lead") and f"Held-out accuracy {interval}" in page.text("dpo")
    change(run / "dpo" / "summary.json", held_out=held_out | {"accuracy": 0.7, "low": 0.604, "high": 0.781})
    assert "implicit reward" not in lead(run)


def test_a_preference_model_that_is_no_better_than_its_baselines_is_a_warning_at_the_top(tmp_path):
    run = make_run(tmp_path, ("sft", "preference", "ppo", "evaluate", "report"), gold=False)
    held_out = {"pairs": 100, "accuracy": 0.55, "low": 0.45, "high": 0.65, "ece": 0.1, "loss": 0.7}
    change(run / "preference" / "summary.json", held_out=held_out, baselines={"chance": 0.5, "length": None, "ceiling": None})
    assert "Warning: the preference model is not reliably better than chance, which reaches 50.0%" in lead(run)
    change(run / "preference" / "summary.json", held_out=held_out | {"accuracy": 0.7, "low": 0.6, "high": 0.78})
    assert "not reliably better" not in lead(run)


@pytest.mark.parametrize(("scores", "prompts", "remark"), [
    ((0.0, 1.0), 16, "; the difference is within noise."), ((0.4, 0.5), 16, "."),
    ((0.4, 0.5), 1, "; there are too few answers to tell whether the difference is noise."),
])
def test_a_score_that_changed_by_noise_only_is_said_to(tmp_path, scores, prompts, remark):
    run = make_run(tmp_path, ("sft", "preference", "ppo", "evaluate", "report"), gold=False)
    change(run / "summary.json", preference_score={"base": 0.0, "sft": 0.45, "ppo": 0.55})
    path = run / "evaluate" / "rows-00000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [row | {"score": scores[index % 2] + 0.1 * (row["model"] == "ppo")} for index, row in enumerate(rows)
                      if int(row["prompt_id"].removeprefix("e-")) < prompts])
    assert f"at a KL to the model after fine-tuning of 2.95 nats per response{remark}" in lead(run)


@pytest.mark.parametrize(("count", "shown"), [
    (1, "The only prompt. "), (5, "All 5 prompts, in"), (12, "The first 12 prompts, in"), (16, "The first 12 prompts, in"),
])
def test_the_shown_prompts_are_counted(tmp_path, count, shown):
    run = make_run(tmp_path, ("sft", "evaluate", "report"), gold=False)
    path = run / "evaluate" / "rows-00000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [row for row in rows if int(row["prompt_id"].removeprefix("e-")) < count])
    change(run / "config.json", evaluate={"examples": 12})
    assert shown in render_page(run)[1].text("answers")


@pytest.mark.parametrize(("scores", "inputs", "shown"), [
    ({"base": -0.16, "sft": 0.1, "ppo": -0.36}, ["sft"], "RL fell to -0.36 from 0.10 for the model after fine-tuning"),
    ({"base": -0.16, "sft": 0.1, "ppo": -0.1}, [], "RL rose to -0.10 from -0.16 for the starting model"),
    ({"base": 0.2, "sft": 0.1, "ppo": 0.1}, ["sft"], "RL is 0.10, as for the model after fine-tuning"),
])
def test_the_score_is_compared_with_the_model_that_rl_started_from(tmp_path, scores, inputs, shown):
    run = make_run(tmp_path, ("sft", "preference", "ppo", "evaluate", "report"), gold=False)
    change(run / "ppo" / "manifest.json", inputs=dict.fromkeys(inputs, ""))
    change(run / "summary.json", preference_score=scores)
    assert f"{shown}, from which its training started, at a KL to the model after fine-tuning of 2.95 nats" in lead(run)


def test_lost_rows_are_counted_with_their_shares_near_the_top(tmp_path):
    run = make_run(tmp_path)
    report = {"path": "in/pairs.jsonl", "rows": 80, "pairs": 48, "too_long": list(range(32)), "cut": [3, 4], "broken": []}
    change(run / "preference" / "summary.json", data=report)
    change(run / "sft" / "summary.json", cut=11)
    change(run / "revise" / "summary.json", incomplete=5)
    change(run / "compare" / "summary.json", pairs=1000, identical_pairs=200, incomplete=80)
    change(run / "summary.json", complete={"base": 1.0, "sft": 0.75, "ppo": 0.5})
    write_json(run / "ppo" / "left_out.json", {"the rl prompts": {"total": 60, "dropped": 15, "cut": 3}})
    shown = lead(run)
    for sentence in (
        "Of the 80 rows of in/pairs.jsonl, 48 (60.0%) were kept; 2 (2.5%) too long, oldest turns cut; 32 (40.0%) too long even",
        "11 (50.0%) of the answers of fine-tuning were cut to sft.row_length.",
        "5 (20.0%) of the answers and revisions did not end within revise.max_new_tokens.",
        "80 (5.0%) of the compared answers did not end within compare.max_new_tokens; training treats them as complete.",
        "1.0% of the responses of the last iteration of RL did not end within ppo.max_new_tokens.",
        "25.0% for the model after supervised CAI and 50.0% for the model after RL.",
        "Of the 60 rows of the rl prompts in stage ppo, 15 (25.0%) were dropped because they did not fit or the text format "
        "rejected them and 3 (5.0%) were cut at their oldest turns.",
    ):
        assert sentence in shown and shown.index(sentence) < shown.index("The base model"), sentence


def test_cut_texts_of_every_stage_that_cuts_are_counted(tmp_path):
    run = make_run(tmp_path)
    change(run / "config.json", stages=["pretrain", "sft", "preference", "best_of_n", "dpo", "report"])
    for stage, summary in {"pretrain": {"documents": 200, "cut": 30}, "preference": {"train_pairs": 20, "cut": 4},
                           "best_of_n": {"chosen": 8, "cut": 2}, "dpo": {"train_rows": 9, "cut": 7}}.items():
        change(run / stage / "summary.json", **summary)
    shown = lead(run)
    for sentence in (
        "30 (15.0%) of the documents of pretraining were cut to pretrain.row_length.",
        "4 (10.0%) of the answers of the preference model's pairs, with their prompts, were cut to preference.max_length.",
        "2 (25.0%) of the answers chosen by best_of_n, with their prompts, were cut to best_of_n.row_length.",
        "7 of the answers of DPO, with their prompts, were cut to dpo.max_length.",
    ):
        assert sentence in shown, sentence


@pytest.mark.parametrize(("unit", "place"), [({}, "line 31"), ({"unit": "row"}, "row 31")])
def test_the_reason_of_the_first_broken_row_is_shown(tmp_path, unit, place):
    run, broken = make_run(tmp_path), [{"line": 31, "reason": "weight is '-1'; a number of at least 0 is expected"}]
    report = {"path": "in/pairs.jsonl", "rows": 80, "pairs": 79, "broken": broken, **unit}
    change(run / "preference" / "summary.json", data=report)
    expected = f"1 (1.2%) broken, dropped, {place}: weight is '-1', a number of at least 0 is expected."
    text = lead(run)
    assert f"Of the 80 rows of in/pairs.jsonl, 79 (98.8%) were kept; {expected}" in text
    assert "in/pairs.jsonl: 80 rows, 79 pairs kept." in text


def test_the_good_and_the_bad_answers_kept_of_a_file_are_counted(tmp_path):
    run = make_run(tmp_path)
    report = {"path": "in/judged.jsonl", "rows": 1240, "desirable": 1012, "undesirable": 228, "broken": []}
    change(run / "sft" / "summary.json", data=report)
    assert "in/judged.jsonl: 1,240 rows, 1,012 good and 228 bad answers kept." in row_sentences(read_run(run))


def test_a_file_of_which_most_rows_were_dropped_has_a_warning(tmp_path):
    run = make_run(tmp_path)
    report = {"path": "in/pairs.jsonl", "rows": 80, "pairs": 20, "too_long": list(range(60)), "cut": [], "broken": []}
    change(run / "preference" / "summary.json", data=report)
    assert "Warning: only 20 of 80 rows of in/pairs.jsonl can be used; raise model.max_length, and preference" in lead(run)


def test_settings_without_an_effect_are_listed_apart(tmp_path):
    run = make_run(tmp_path, ("sft", "evaluate", "report"), gold=False)
    change(run / "config.json", model={"source": "huggingface", "path": "m", "layers": 4, "remat": False},
           ppo={"kl_coef": 0.05}, preference={"max_length": 64, "epochs": 3}, feedback={"constitution": "default"})
    change(run / "sft" / "manifest.json", config={"model": {}, "preference.max_length": 64})
    change(run / "summary.json", win_rates=[])
    read, _, unused = render_page(run)[1].text("config").partition("settings without an effect on this run")
    for line in ("config.model.path = \"m\"", "config.preference.max_length = 64", "config.sft.min_rows = 8",
                 "config.mesh.data = 1"):
        assert line in read, line
    for line in ("config.model.layers = 4", "config.ppo.kl_coef = 0.05", "config.preference.epochs = 3",
                 "config.feedback.constitution"):
        assert line in unused, line


def test_links_lead_to_sections_with_content(tmp_path):
    run = make_run(tmp_path, STAGES[:3])
    change(run / "config.json", stages=list(STAGES))
    source, page = render_page(run)
    assert "The ppo stage has not run yet" in page.text("rl") and 'href="#rl"' not in source
    assert 'href="#revisions"' in source


def test_no_section_of_answers_without_examples(tmp_path):
    run = make_run(tmp_path, ("sft", "evaluate", "report"), gold=False)
    source, page = render_page(run, examples=0)
    assert "answers" not in page.sections and 'href="#answers"' not in source


@pytest.mark.parametrize(("judge", "served"), [("endpoint", True), ("local", False)])
def test_the_settings_of_a_judge_that_was_asked_are_among_those_with_an_effect(tmp_path, judge, served):
    run = make_run(tmp_path)
    change(run / "config.json", feedback={"judge": judge}, judge={"retries": 2}, endpoint={"url": ["http://h/v1"]})
    change(run / "compare" / "manifest.json", config={"feedback.judge": judge})
    read, _, unused = render_page(run)[1].text("config").partition("settings without an effect on this run")
    assert "config.judge.retries = 2" in read and ("config.endpoint.url" in read) == served != ("config.endpoint.url" in unused)


@pytest.mark.parametrize(("scores", "said"), [
    ([0.5, -0.25], "; the mean score of its answers in training was 0.50 in the first iteration and -0.25 in the last. 2 "
                   "iterations are too few to show a trend."),
    (["nan", 0.5, 1.0, "nan"], "; the mean score of its answers in training was 0.50 in the first iteration with a score and "
                               "1.00 in the last. 2 iterations are too few to show a trend."),
    ([0.5], "; the mean score of its answers in training was 0.50 in the only iteration."),
    (["nan", "nan"], "; no answer in training had a score."),
])
def test_rl_without_an_evaluation_says_where_it_started_and_the_first_and_last_score_of_few_iterations(tmp_path, scores, said):
    run = make_run(tmp_path, ("sft", "ppo", "report"))
    write_rows(run / "ppo" / "metrics.jsonl", [{"step": step, "score": score} for step, score in enumerate(scores)])
    shown = lead(run)
    assert f"RL started from the model after fine-tuning{said}" in shown
    assert "Fine-tuning loss 1.490 → before, then 0.610 fell" in shown


@pytest.mark.parametrize(("optimizer", "said"), [
    ({"learning_rate": 1e-3, "warmup_steps": 10}, "the warm-up has 10 steps but training 4, so the learning rate reaches only "
                                                  "40.0% of its peak; lower warmup_steps."),
    ({"learning_rate": 0, "warmup_steps": 0}, "the learning rate is 0, so no weight changes."),
    ({"learning_rate": 1e-3, "warmup_steps": 4}, None),
])
@pytest.mark.parametrize(("stage", "section", "summary"), [
    ("sft", {}, {"steps": 4}),
    ("ppo", {"iterations": 1, "epochs": 2, "minibatches": 2}, {"iterations": 1}),
])
def test_a_learning_rate_that_stays_low_is_a_warning(tmp_path, stage, section, summary, optimizer, said):
    run = make_run(tmp_path)
    change(run / "config.json", **{stage: section | {"optimizer": optimizer}})
    change(run / stage / "summary.json", **summary)
    found = [sentence for sentence in warnings(read_run(run)) if "learning rate" in sentence]
    assert found == ([] if said is None else [f"Warning: in stage {stage}, {said}"])


@pytest.mark.parametrize(("unscored", "said"), [
    ([2, 0, 0], "In stage ppo, 2 of 48 responses (4.2%) had no score from the reward and were not trained on."),
    ([0, 0, 16], "Warning: in stage ppo, 16 of 48 responses (33.3%) had no score from the reward and were not trained on; the "
                 "log has the reason."),
    ([0, 0, 0], None),
])
def test_the_responses_of_rl_without_a_score_are_counted(tmp_path, unscored, said):
    run = make_run(tmp_path)
    change(run / "config.json", ppo={"batch": 16})
    rows = [{"step": step, "score": 0.5 if count < 16 else "nan", "no_score": count} for step, count in enumerate(unscored)]
    write_rows(run / "ppo" / "metrics.jsonl", rows)
    shown = lead(run)
    assert shown.count("no score from the reward") == (said is not None) and (said or "") in shown


def test_a_single_model_is_not_said_to_be_compared(tmp_path):
    run = make_run(tmp_path, ("evaluate", "report"), gold=False)
    change(run / "summary.json", models=["base"], win_rates=[], preference_score={})
    shown = lead(run)
    assert "so there are no rates." in shown and "compared by" not in shown


@pytest.mark.parametrize(("stages", "shown"), [
    (["pretrain", "sft", "preference", "ppo"], "KL to sft"), (["pretrain", "preference", "ppo"], "KL to base"),
    (["pretrain", "sft", "best_of_n", "preference", "ppo"], "KL to sft"),
])
def test_the_kl_is_named_by_the_stages_that_evaluate_recorded(tmp_path, stages, shown):
    """The reference is the policy that the preference model starts from, whatever the config of the folder says now."""
    run = make_run(tmp_path)
    change(run / "evaluate" / "manifest.json", config={"stages": [*stages, "evaluate"]})
    assert f"{shown}, nats per response" in render_page(run)[1].text("behaviour")


@pytest.mark.parametrize("damage", [{"inputs": float("nan")}, {"inputs": ["sft"]}, {"config": 7}, {"status": 1}])
def test_a_manifest_with_values_of_other_types_is_refused(tmp_path, damage):
    run = make_run(tmp_path)
    path = run / "ppo" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(UserError, match=f"ppo/manifest.json is damaged: {next(iter(damage))} is "):
        read_run(run)


@pytest.mark.parametrize("damage", [{"stages": 7}, {"stages": [7]}, {"ppo": 7}, {"rounds": "2"}, {"reward": [1]}])
def test_a_config_with_values_of_other_types_is_refused(tmp_path, damage):
    run = make_run(tmp_path)
    change(run / "config.json", **damage)
    with pytest.raises(UserError, match=f"config.json is damaged: {next(iter(damage))} is "):
        read_run(run)
