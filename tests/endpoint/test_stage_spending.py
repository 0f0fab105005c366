"""The counts of requests, tokens and money in the summaries of stages."""

from __future__ import annotations

import json
import sqlite3

import pytest

from jaxalign import pipeline
from jaxalign.endpoint.records import Reply, Usage
from jaxalign.endpoint.spending import BudgetReached
from jaxalign.tracking import requests
from tests.endpoint.clients import spending
from tests.endpoint.runs import config
from tests.tracking.pages import render_page

ASKING = ("revise", "compare", "evaluate")
PRICES = {"input_price": 1000.0, "output_price": 2000.0}


@pytest.fixture(scope="module")
def folder(tiny_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spending")
    (folder / "model").symlink_to(tiny_server.model)
    questions = [f"Is answer {i} better, A or B?" for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return folder


@pytest.fixture(scope="module")
def interrupted(tiny_server, folder):
    """A run that stopped at its budget in stage revise, and then finished with another one."""
    url = tiny_server.server.url
    with pytest.raises(BudgetReached):
        pipeline.run(config(folder, url, budget=1.5, **PRICES), folder / "run")
    pipeline.run(config(folder, url, budget=1000.0, **PRICES), folder / "run")
    return folder / "run"


def recorded(workdir):
    """The counts of each stage that has some."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(workdir.glob("*/summary.json"))}
    return {name: summary["endpoint"] for name, summary in found.items() if "endpoint" in summary}


def stored_sums(workdir):
    """(replies, prompt tokens, generated tokens, price) of all stored answers."""
    with sqlite3.connect(workdir / "endpoint.sqlite") as connection:
        return connection.execute(
            "SELECT COUNT(*), SUM(prompt_tokens), SUM(completion_tokens), SUM(cost) FROM answers"
        ).fetchone()


@pytest.mark.slow
def test_the_stages_of_an_interrupted_run_add_up_to_the_stored_answers(interrupted):
    counts = recorded(interrupted)
    assert sorted(counts) == sorted(ASKING)
    replies, prompt, completion, cost = stored_sums(interrupted)
    assert sum(each["prompt_tokens"] for each in counts.values()) == prompt
    assert sum(each["completion_tokens"] for each in counts.values()) == completion
    assert sum(each["money"] for each in counts.values()) == pytest.approx(cost)
    assert cost == pytest.approx((1000 * prompt + 2000 * completion) / 1e6)
    # The list of models is sent, too, and has no stored reply. Retries are further requests.
    assert sum(each["sent"] - each["retries"] for each in counts.values()) == replies + 1


@pytest.mark.slow
def test_a_summary_names_the_model_and_the_url(interrupted, tiny_server):
    for each in recorded(interrupted).values():
        assert each["model"] and each["urls"] == [tiny_server.server.url.rstrip("/")]


@pytest.mark.slow
def test_the_report_has_a_row_for_each_stage_and_the_total(interrupted, tiny_server):
    _, page = render_page(interrupted)
    replies, prompt, completion, cost = stored_sums(interrupted)
    text = page.text("requests")
    for name, each in recorded(interrupted).items():
        assert f"{name} {each['sent']:,} {each['retries']:,} {each['stored_hits']:,} {each['prompt_tokens']:,}" in text
    assert f"all {replies + 1:,} 0" in text and f"{prompt:,} {completion:,} 0 none {cost:,.2f}" in text
    assert f"This run spent {cost:,.2f}. The budget of all runs that share the stored answers is 1,000.00." in text
    judged = "criticised and revised the base model's answers, labelled the pairs of answers and decided the win rates"
    assert f"at {tiny_server.server.url.rstrip('/')} {judged}." in page.text("lead")


@pytest.mark.slow
def test_a_replay_is_answered_from_the_store(folder, interrupted, tiny_server, capsys):
    offline = config(folder, tiny_server.server.url, offline=True, cache=str(interrupted / "endpoint.sqlite"), **PRICES)
    pipeline.run(offline, folder / "replay")
    lines, counts = capsys.readouterr().out, recorded(folder / "replay")
    assert sorted(counts) == sorted(ASKING)
    for name, each in counts.items():
        assert each["sent"] == 0 and each["money"] == 0.0 and each["stored_hits"] > 0
        assert f"[{name}] 0 requests sent, {each['stored_hits']} answered from the store" in lines


@pytest.mark.slow
def test_progress_shows_the_money_spent(folder, tiny_server, capsys):
    run = config(folder, tiny_server.server.url, **PRICES)
    pipeline.run(run, folder / "shown")
    captured = capsys.readouterr()
    spent = requests.amount(recorded(folder / "shown")["revise"]["money"])
    assert f"{spent} spent" in next(line for line in captured.err.splitlines() if line.startswith("[revise] finished"))
    assert f"{spent} spent" in next(line for line in captured.out.splitlines() if line.startswith("[revise] ") and
                                    "requests sent" in line)


def test_counts_of_a_process_that_was_killed_are_kept(tmp_path):
    killed = spending(tmp_path, input_price=1.0)
    killed.begin_stage("ppo", resumed=False)
    killed.count("sent", 2)
    killed.count("failures.timeout")
    killed.count_reply(Reply("x", "stop", usage=Usage(7, 3)), 0.5)

    later = spending(tmp_path, input_price=1.0)
    later.begin_stage("ppo", resumed=True)
    later.count("sent")
    later.count_reply(Reply("x", "content_filter", usage=Usage(1, 0)), 0.25)
    later.end_stage()
    assert later.of_stage() == {
        "sent": 3, "stored_hits": 0, "prompt_tokens": 8, "completion_tokens": 3, "retries": 0, "content_filter": 1,
        "failures": {"timeout": 1}, "money": 0.75, "prices_date": "",
    }


def test_a_stage_that_is_made_again_counts_from_zero(tmp_path):
    counts = spending(tmp_path)
    counts.begin_stage("ppo", resumed=False)
    counts.count("stored_hits", 5)
    counts.end_stage()
    counts.begin_stage("ppo", resumed=False)
    assert counts.of_stage()["stored_hits"] == 0
