"""Runs compared on one page: what differs, whether it is more than noise, curves and answers side by side, broken runs."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxalign import compare
from jaxalign.errors import UserError
from jaxalign.tracking.comparing.page import render_comparison
from jaxalign.tracking.comparing.runs import affects_results
from jaxalign.tracking.differences import Estimate, difference

from .pages import Page
from .synthetic import make_run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("base"))


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def runs(base, tmp_path):
    """A run, one with another KL coefficient and more harmful help, and one that trained only by fine-tuning."""
    one, two, three = (shutil.copytree(base, tmp_path / name) for name in ("one", "two", "three"))
    change(two / "config.json", lambda config: config["ppo"].update(kl_coef=0.2))
    worse = {"count": 60, "total": 200, "rate": 0.3, "low": 0.2407, "high": 0.3668}
    change(two / "summary.json", lambda summary: summary["rates"]["ppo"].update(harmful=worse))
    for stage in ("compare", "preference", "ppo"):
        shutil.rmtree(three / stage)
    change(three / "config.json", lambda config: config.update(stages=["pretrain", "revise", "sft", "evaluate", "report"]))
    change(three / "summary.json", lambda summary: summary.update(models=["base", "sft"]))
    return one, two, three


def page_of(*runs):
    target = runs[0].parent / "page.html"
    problems = render_comparison(runs, target)
    source = target.read_text(encoding="utf-8")
    return source, Page(source), problems


def test_the_interval_of_a_difference_is_that_of_newcombe():
    """56/70 against 48/80: the example of Newcombe (1998), table II, method 10, without continuity correction."""
    first, other = Estimate(48 / 80, 0.4904, 0.7004), Estimate(56 / 70, 0.6917, 0.8770)
    found = difference(first, other)
    assert (round(found.low, 3), round(found.high, 3)) == (0.052, 0.334) and found.clear
    same = difference(first, first)
    assert same.value == 0 and not same.clear


def test_the_title_of_the_kl_names_the_reference_of_each_run(runs):
    change(runs[2] / "evaluate" / "manifest.json", lambda manifest: manifest["config"].update(stages=["pretrain", "evaluate"]))
    source, _, _ = page_of(runs[0], runs[2])
    assert "KL to sft, nats per response or KL to base, nats per response" in source


def test_the_opening_names_the_settings_that_differ_and_the_differences_beyond_noise(runs):
    _, page, problems = page_of(*runs[:2])
    assert problems == []
    opening = page.text("lead")
    assert "The runs differ in one setting on which results can depend: ppo.kl_coef." in opening
    # 9 of 200 against 60 of 200, by hand: 25.5 - hypot(30 - 24.07, 8.33 - 4.5), 25.5 + hypot(36.68 - 30, 4.5 - 2.39).
    assert "two against one: harmful help +25.5 points (+18.4 to +32.5), more than noise, worse." in opening
    assert "config.ppo.kl_coef 0.05 0.2" in page.text("settings")


def test_equal_runs_have_no_differences(base, tmp_path):
    one, two = (shutil.copytree(base, tmp_path / name) for name in ("one", "two"))
    _, page, _ = page_of(one, two)
    assert "All settings on which results can depend are the same." in page.text("lead")
    assert "two against one: no difference in the main measures." in page.text("lead")


@pytest.mark.parametrize(("name", "affects"), [
    ("placement.strategy", False), ("placement.generation_devices", False), ("placement.roles", False), ("mesh.fsdp", False),
    ("ppo.sample_ahead", True), ("ppo.kl_coef", True)])
def test_results_depend_on_sampling_ahead_and_not_on_the_placement(name, affects):
    assert affects_results(name) == affects


def test_curves_answers_and_rates_of_different_stages_are_side_by_side(runs):
    source, page, _ = page_of(*runs)
    assert "Without this stage, or without its metrics: three." in page.text("curves-ppo")
    assert "three: after supervised CAI" in page.text("rates")
    answers = page.text("answers")
    assert "16 prompts were answered by all of one, two, three" in answers
    assert answers.index("one") < answers.index("two") < answers.index("three")
    curve = source[source.index('id="curves-pretrain"'):]
    assert [f'line tone-{tone}"' in curve for tone in (1, 2, 3)] == [True] * 3
    linked = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert linked <= {f"#{name}" for name in page.sections} and "#rates" in linked
    assert "<script" not in source and 'src="' not in source


def test_a_broken_or_half_written_run_is_left_out_with_a_sentence(runs):
    one, two, three = runs
    (three / "sft" / "summary.json").write_text('{"steps": 1')
    _, page, problems = page_of(one, two, three)
    assert len(problems) == 1 and problems[0].startswith("three is left out: ") and "is not JSON" in problems[0]
    assert problems[0] in page.text("lead")
    (two / "ppo" / "metrics.jsonl").write_text('{"step": 0, "score": 1.0}\n{"step": 1, "sco')  # Being written.
    assert page_of(one, two)[2] == []
    (two / "evaluate" / "rows-00000.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="fewer than two of the work directories can be compared. two is left out: .* line 1"):
        page_of(one, two)


def test_a_run_that_is_compared_is_not_changed_and_equal_files_give_equal_pages(runs):
    before = sorted(runs[0].rglob("*"))
    assert page_of(*runs)[0] == page_of(*runs)[0]
    assert sorted(runs[0].rglob("*")) == before


@pytest.mark.parametrize(("arguments", "says"), [
    (["{one}"], "the number of work directories is 1; pass those of 2 to 6 runs"),
    (["{one}", "{one}"], "is given twice"),
    (["{one}", "{one}/../none"], "none is left out: The work directory"),
    (["--output=x", "{one}"], "--output is not a flag of compare"),
    (["--out=", "{one}"], "--out has no value"),
])
def test_a_mistake_in_the_arguments_is_one_sentence(base, capsys, arguments, says):
    assert compare.main(["compare", *(argument.format(one=base) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err and captured.err.count("\n") == 1


def test_the_command_writes_the_page(runs, tmp_path, capsys):
    assert compare.main(["compare", f"--out={tmp_path / 'new' / 'page.html'}", *map(str, runs)]) == 0
    assert capsys.readouterr().out == f"Comparison: {tmp_path / 'new' / 'page.html'}\n"
    assert (tmp_path / "new" / "page.html").exists()
