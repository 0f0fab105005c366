"""The report: its numbers equal the files, missing parts are explained, and hostile text is escaped."""

from __future__ import annotations

import html
import json
import re

import pytest

from jaxalign.errors import UserError
from jaxalign.tracking.report.page import render_report
from jaxalign.tracking.report.training import reinforcement
from jaxalign.tracking.workdir import read_run

from .pages import render_page
from .synthetic import STAGES, make_run, write_json, write_rows

SECTIONS = ("lead", "changes", "behaviour", "wins", "answers", "revisions", "labels", "preference", "rl", "losses", "time",
            "config")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return render_page(make_run(tmp_path_factory.mktemp("full")))


def test_every_section_has_a_heading_and_nothing_is_missing(full):
    source, page = full
    assert tuple(page.sections) == SECTIONS
    headed = {attributes["id"] for tag, attributes in page.tags if tag == "h2"}
    assert headed == {f"{name}-title" for name in SECTIONS}
    assert 'class="missing"' not in source


@pytest.mark.parametrize(("section", "shown"), [
    ("behaviour", "Helpful, alarming words 91.0% (91/100) 83.8 to 95.2 90.0% (90/100) 82.6 to 94.5"),
    ("behaviour", "KL to sft, nats per response 8.21 0.00 2.95"), ("behaviour", "Each model answered the same 400 prompts."),
    ("wins", "After RL against after supervised CAI"), ("wins", "63.1% (101 of 160)"),
    ("wins", "40 undecided, each counted as half a win."),
    ("revisions", "Round 1 changed 12 of 12 answers (100%). Round 2 changed 9 of 12 answers (75%)."),
    ("labels", "Undecided 78 (7.8%)"), ("labels", "Same verdict in both orders 91.3%"),
    ("labels", "Position bias 1.2 points towards the answer shown first"), ("labels", "harmlessness 520 - - - - 0.871"),
    ("preference", "Held-out accuracy 89.0% (95% interval 81.4% to 93.8%)"), ("preference", "(ECE) 0.0412"),
    ("preference", "counted in both orders of its answers; larger dots contain more of these 100 ordered pairs."),
    ("rl", "after normalisation, (score - shift) / scale with a shift of -0.31 and a scale of 0.4167; the evaluation"),
    ("behaviour", "Preference score before normalisation"),
    ("rl", "60 iterations of PPO, 2 of which the KL limit ended early."), ("rl", "sampler passed 2e-06 0.0001"),
    ("rl", "k1 0.00 → 2.95; k3 0.00 → 2.83"), ("losses", "Pretraining 420 1,200,000 7.4 1.12 1.31"),
    ("losses", "The last loss of a stage is the mean of its last 10 steps, or of all if it has fewer."),
    # compile 4.5 s and work 20, 25, ... 55 s of eight stages: 8 * 4.5 + 300 = 336 s
    ("time", "Stage ppo: config.ppo.micro_batch_tokens=auto: 768 tokens per device."),
    ("time", "5:36 in total."), ("time", "pretrain all 0:24 250,000 10,204"), ("config", "config.ppo.kl_coef = 0.05"),
    ("config", "config.ppo.target_kl = null")])
def test_numbers_equal_those_of_the_files(full, section, shown):
    assert shown in full[1].text(section)


def test_examples_are_the_first_of_each_kind_side_by_side(full):
    answers = full[1].text("answers")
    # 8 examples over 4 kinds: two each; kind number k holds the prompts k, k + 4, ...
    assert [int(number) for number in re.findall(r"case (\d+)\?", answers)] == [0, 4, 1, 5, 2, 6, 3, 7]
    first = answers[answers.index("case 0?"):answers.index("case 4?")]
    assert re.search(r"helpful-only Spread .* gives harmful help rude after supervised CAI No, salt .* refuses "
                     r"after RL No,", first)
    assert "The gold judge finds no fault in any of its answers." in answers


def test_faults_of_the_last_model_are_shown(tmp_path):
    run = make_run(tmp_path)
    path = run / "evaluate" / "rows-00000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["model"] == "ppo" and row["prompt_id"] in ("e-2", "e-9"):
            row["gold"] |= {"refused": True, "evasive": True, "helpful": False}
    write_rows(path, rows)
    _, page = render_page(run)
    wrong = page.text("answers").partition("Faults of the last model")[2]
    assert "The first 2 answers of the model after RL in which the gold judge finds a fault." in wrong
    assert re.findall(r"case (\d+)\?", wrong) == ["2", "9"]
    assert "refuses a harmless request evasive" in wrong


def test_critiques_are_between_answer_and_revision(full):
    revisions = full[1].text("revisions")
    assert re.search(r"First answer Mix a spoon .* Critique 1 harmlessness Bleach on fish .* Revision 1 No, .*"
                     r"Critique 2 courtesy The words .* Revision 2 No, .* unchanged", revisions)
    assert "help-0" not in revisions and "clean a floor" not in revisions


def test_page_loads_nothing_external_and_runs_no_script(full):
    source, page = full
    assert not re.search(r"https?://|@import|url\(", source)
    assert not {name for _, attributes in page.tags for name in attributes} & {"src", "srcset", "action", "background"}
    assert all(attributes["href"].startswith("#") for _, attributes in page.tags if "href" in attributes)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
    policy = [attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_page_works_with_a_screen_reader_and_a_keyboard(full):
    _, page = full
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) > 20 and all(one["role"] == "img" and len(one["aria-label"]) > 10 for one in drawings)

    def count(wanted):
        return sum(tag == wanted for tag, _ in page.tags)

    assert count("table") == count("caption") > 5
    assert count("h1") == 1
    targets = {attributes.get("id") for _, attributes in page.tags}
    assert all(attributes["href"][1:] in targets for tag, attributes in page.tags if tag == "a")
    assert ("html", {"lang": "en"}) in page.tags


EVIL = '</p><script>alert("x")</script><img src=x onerror=alert(1)>\x00\x1b[31m\ud800 & "quoted" {{ 7*7 }}'


def test_hostile_text_is_shown_as_text(tmp_path):
    run = make_run(tmp_path / "<b>run")
    for stage in ("revise", "compare", "evaluate"):
        path = run / stage / "rows-00000.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            for field in ("response", "critique", "revision", "response_a", "reasoning_ab", "principle"):
                if row.get(field) is not None:
                    row[field] = EVIL
            row["messages"] = [{"role": "user", "content": EVIL}]
            row["kind"] = EVIL if stage == "evaluate" else None
        write_rows(path, rows)
    config = {"seed": EVIL, "stages": list(STAGES), "feedback": {"constitution": EVIL}, EVIL: EVIL}
    write_json(run / "config.json", config)
    summary = json.loads((run / "summary.json").read_text())
    summary["rates"]["base"][EVIL] = summary["rates"]["base"]["harmful"]
    write_json(run / "summary.json", summary)
    source, page = render_page(run)
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert "<b>run" not in source
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "\x00" not in source and "\x1b" not in source
    assert 'alert("x")' in page.text("answers") and "{{ 7*7 }}" in page.text("answers")


def test_run_on_real_preferences_without_gold_or_feedback(tmp_path):
    source, page = render_page(make_run(tmp_path, ("sft", "preference", "ppo", "evaluate", "report"), gold=False))
    shown = ("lead", "changes", "behaviour", "wins", "answers", "preference", "rl", "losses", "time", "config")
    assert tuple(page.sections) == shown
    lead = page.text("lead")
    assert lead.startswith(
        "What happened The mean score before normalisation that the preference model gives to the answers of the model after "
        "RL rose to 1.31 from 0.01 for the model after fine-tuning, from which its training started, at a KL to the model "
        "after fine-tuning of 2.95 nats per response; there are too few answers to tell")
    assert "The model after fine-tuning was preferred over the starting model in 78.3% of 180 comparisons" in lead
    assert ("No rules decide which answers to this run's prompts are right, so there are no rates; the models are compared by "
            "win rate, preference score, KL and length.") in page.text("behaviour")
    assert "Pretraining loss" not in page.text("losses") and 'class="missing"' in source
    assert len(re.findall(r"case \d+\?", page.text("answers"))) == 8
    assert "gold judge" not in page.text("answers")


@pytest.mark.parametrize("count", range(1, len(STAGES)))
def test_every_part_of_a_run_can_be_reported(tmp_path, count):
    run = make_run(tmp_path, STAGES[:count])
    config = json.loads((run / "config.json").read_text()) | {"stages": list(STAGES)}
    write_json(run / "config.json", config)
    _, page = render_page(run)
    if "evaluate" not in STAGES[:count]:
        assert "The evaluate stage has not run yet" in page.text("behaviour")
    last = STAGES[count - 1]
    absent = {"evaluate": (), "ppo": ("wins", "answers")}.get(last, ("wins", "answers", "changes"))
    assert tuple(page.sections) == tuple(name for name in SECTIONS if name not in absent)
    if "ppo" not in STAGES[:count]:
        assert "The ppo stage has not run yet" in page.text("rl")


@pytest.mark.parametrize(("rows", "notice"), [
    (['{"event": "failed", "stage": "compare", "error": "too few <pairs>."}'],
     "The run failed in stage compare: too few <pairs>. When the cause is corrected, the same command resumes the run, "
     "or lists the stages that the change makes out of date."),
    (['{"event": "failed", "stage": "compare"}'], "The run failed in stage compare: the log of the run has the reason."),
    (['{"event": "failed", "stage": "compare"}', '{"stage": "compare"}'], ""),
    (['{"event": "failed", "stage": "compare", "error": "a call failed; fix the cause and run the same command again"}'],
     "The run failed in stage compare: a call failed; fix the cause and run the same command again."),
    (['{"event": "interrupted", "stage": "compare"}'], ""),
    (["\x00"], ""),
])
def test_a_failed_run_states_the_stage_and_the_reason_until_it_is_resumed(tmp_path, rows, notice):
    run = make_run(tmp_path, STAGES[:3])
    write_json(run / "config.json", json.loads((run / "config.json").read_text()) | {"stages": list(STAGES)})
    (run / "system.jsonl").write_text("".join(f"{row}\n" for row in rows))
    source, page = render_page(run)
    header = html.unescape(source.partition("<main>")[0])
    assert notice in header and bool(notice) == ("The run failed" in header) == ("compare: failed" in header)
    interrupted = "The run was interrupted in stage compare. The same command resumes it." in header
    assert interrupted == ("compare: interrupted" in header) == ("interrupted" in rows[-1])
    assert interrupted == ("The compare stage was interrupted; once it has finished" in page.text("labels"))
    assert ("The compare stage failed; once it has finished" in page.text("labels")) == bool(notice)
    later = "has not run yet, because the run failed in stage compare" if notice else "has not run yet; once it has"
    assert f"The ppo stage {later}" in page.text("rl")


def test_unfinished_stage_shows_its_curves_so_far(tmp_path):
    run = make_run(tmp_path, STAGES[:6])
    write_json(run / "ppo" / "manifest.json", {"stage": "ppo", "status": "running"})
    (run / "ppo" / "summary.json").unlink()
    _, page = render_page(run)
    assert "The ppo stage has not finished yet" in page.text("rl")
    assert "Score and reward" in page.text("rl")


def test_the_parts_of_the_score_are_the_terms_of_a_sum(tmp_path):
    run = make_run(tmp_path)
    rows = [{"step": step, "score": 1.0, "score_std": 0.5, "score_changed": 0.125} for step in range(3)]
    write_rows(run / "ppo" / "metrics.jsonl", rows)
    shown = render_page(run)[1].text("rl")
    assert "Parts of the score" not in shown and "Standard deviation of the scores" in shown
    assert "Responses whose score was changed for lack of a stop token" in shown
    write_rows(run / "ppo" / "metrics.jsonl", [row | {"score_preference": 2.0, "score_length": -1.0} for row in rows])
    parts = next(figure for figure in reinforcement(read_run(run)).figures if figure.title == "Parts of the score")
    assert parts.legend == ("preference", "length")


def test_results_by_column_are_in_a_table(tmp_path):
    run = make_run(tmp_path)
    wins = {"model": "ppo", "against": "sft", "wins": 30, "total": 40, "undecided": 0, "rate": 0.75, "low": 0.5981,
            "high": 0.8581}
    values = {
        "safe": {"prompts": 250, "length": {"base": 24.1, "sft": 22.3, "ppo": 9.5},
                 "complete": {"base": 1.0, "sft": 0.75, "ppo": 0.5}, "win_rates": [wins]},
        "<i>un</i>": {"prompts": 200, "length": {}, "complete": {}, "preference_score": {"base": -0.9, "sft": 0.0, "ppo": 1.5},
                      "win_rates": []}}
    summary = json.loads((run / "summary.json").read_text()) | {"by_column": {"label": values}}
    write_json(run / "summary.json", summary)
    write_json(run / "evaluate" / "summary.json", summary)
    shown = render_page(run)[1].text("columns")
    assert "label Prompts Measure helpful-only after supervised CAI after RL" in shown
    assert "safe 250 Length, tokens 24.1 22.3 9.5" in shown and "safe 250 Complete answers 100.0% 75.0% 50.0%" in shown
    assert "Preferred over the model after supervised CAI - - 75.0% (30/40) 59.8 to 85.8" in shown
    assert "<i>un</i> 200 Preference score before normalisation -0.90 0.00 1.50" in shown


def test_failed_check_is_a_warning_in_the_lead(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run / "ppo" / "summary.json").read_text())
    summary["checks"][2] |= {"value": 0.2, "passed": False}
    write_json(run / "ppo" / "summary.json", summary)
    source, page = render_page(run)
    assert "Warning: 1 of 4 run-time checks of RL failed (sampler)" in page.text("lead")
    assert 'class="warning"' in source
    assert "sampler failed 0.2 0.0001" in page.text("rl")


def test_the_page_says_that_the_checks_of_step_0_are_off(tmp_path):
    run = make_run(tmp_path)
    for path, change in ((run / "ppo" / "summary.json", {"checks": []}),
                         (run / "config.json", {"ppo": {"checks": {"step_zero": False}}})):
        write_json(path, json.loads(path.read_text()) | change)
    text = render_page(run)[1].text("rl")
    assert "The checks at step 0 did not run: ppo.checks.step_zero is off." in text


def test_problems_of_the_judge_are_in_tables(full):
    labels, revisions = full[1].text("labels"), full[1].text("revisions")
    assert "refused 2 (0.2%) the judge declined to answer" in labels and "Identical answers 31 (3.1%)" in labels
    assert "Outside mass 3.4% the mean probability of a text that is none of the options" in labels
    # The synthetic run has 12 prompts with two rounds and one helpful prompt.
    assert "Outcomes of 25 answers and revisions" in revisions and "Can be trained on 23 (92.0%)" in revisions
    assert "unchanged 3 (12.0%) the revision equals the answer" in revisions
    assert "preamble 4 (16.0%) an introduction was removed" in revisions


def test_examples_show_system_messages_outcomes_notes_and_thoughts(tmp_path):
    run = make_run(tmp_path)
    system = {"role": "system", "content": "Be brief."}
    for stage, more in (("revise", {"outcome": "cut_off", "notes": ["shortened"], "reasoning": "Fish are animals."}),
                        ("compare", {"outcome": "refused", "decided": False, "outside": 0.25, "notes": ["fewer_exemplars"],
                                     "disagreement": 0.75})):
        path = run / stage / "rows-00000.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_rows(path, [row | more | {"messages": [system, *row["messages"]]} for row in rows])
    _, page = render_page(run)
    revisions, labels = page.text("revisions"), page.text("labels")
    assert "System message Be brief. User How do I use bleach" in revisions and "User Be brief." not in revisions
    assert "Thoughts before the revision Fish are animals." in revisions
    assert "cut_off: the text reached the length limit" in revisions
    assert "shortened: the judge did not see the oldest turns of the dialogue" in revisions
    assert "refused: the judge declined to answer" in labels and "outside mass 25.0%" in labels
    assert "largest disagreement of the jury 75.0%" in labels and "System message Be brief." in labels


def test_summaries_with_nulls_and_gaps_are_no_error(tmp_path):
    run = make_run(tmp_path)
    for path in run.glob("**/summary.json"):
        content = json.loads(path.read_text())
        write_json(path, {name: None for name in content})
    _, page = render_page(run)
    assert tuple(page.sections) == tuple(name for name in SECTIONS if name != "wins")


def test_config_sets_the_number_of_examples(tmp_path):
    run = make_run(tmp_path)
    assert len(re.findall(r"case \d+\?", render_page(run, examples=4)[1].text("answers"))) == 4
    assert "case" not in render_page(run, examples=0)[1].text("answers")


def test_same_files_give_the_same_page(tmp_path):
    run = make_run(tmp_path)
    before = set(run.rglob("*"))
    assert render_page(run)[0] == render_page(run)[0]
    assert set(run.rglob("*")) - before == {run / "report.html"}


def test_a_run_without_anything_to_report_says_so(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        render_report(tmp_path / "nowhere")
    write_json(tmp_path / "config.json", {"stages": list(STAGES)})
    with pytest.raises(UserError, match="nothing to report .* no stage has written anything"):
        render_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("name", "content", "message"), [
    ("summary.json", "{", r"summary\.json is not JSON"), ("sft/summary.json", "[1]", r"summary\.json contains a list"),
    ("ppo/metrics.jsonl", "{}\n{\n", r"metrics\.jsonl, line 2 is not JSON"),
    ("evaluate/rows-00000.jsonl", "nonsense\n", r"rows-00000\.jsonl, line 1 is not JSON")])
def test_damaged_file_is_named(tmp_path, name, content, message):
    run = make_run(tmp_path)
    (run / name).write_text(content)
    with pytest.raises(UserError, match=message):
        render_report(run)


def own_stage(path, body):
    """A user's stage with a report function, as config.stages names it."""
    path.write_text(f"""
from jaxalign.registry.stages import StageRecord
from jaxalign.tracking.report.blocks import ReportSection, Table
def report(run):
    {body}
POLISH = StageRecord("polish", stage=None, after=("sft",), report=report)
""")
    return f"{path}:POLISH"


@pytest.mark.parametrize(("body", "shown"), [
    ("return ReportSection('polish', 'Polishing', f\"{run.stage('polish').summary['answers']} answers.\")",
     "Polishing 12 answers."),
    ('return [ReportSection("polish", "Polishing", tables=(Table("Counts", ["What", "Value"], [["answers", "12"]]),))]',
     "Polishing Counts What Value answers 12"),
    ("return {}['answers']", "polish The report function of stage polish failed (KeyError: 'answers')."),
    ("return [3]", "failed (TypeError: an object of type int was returned; a ReportSection or a list of them is expected)."),
])
def test_a_users_stage_has_its_section(tmp_path, body, shown):
    run = make_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["stages"].insert(3, own_stage(tmp_path / "own.py", body))
    write_json(run / "config.json", config)
    write_json(run / "polish" / "manifest.json", {"stage": "polish", "status": "done"})
    write_json(run / "polish" / "summary.json", {"answers": 12})
    source, page = render_page(run)
    assert shown in page.text("polish")
    assert '<a href="#polish">' in source and "polish ✓" in source
