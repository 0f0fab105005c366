"""The judge on docs/cai.md, which asks a server: it runs unchanged against a local HTTP server."""

from __future__ import annotations

import collections
import http.server
import json
import pathlib
import re
import threading
import time

import pytest

import jaxalign as ja
from jaxalign.feedback import judge as records
from jaxalign.reasons import PROBLEMS
from jaxalign.records import Message, Principle
from tests.doc_tables import tables

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "cai.md").read_text(encoding="utf-8")
SECTION = re.search(r"^## A judge of your own\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)[1]
CODE = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL)[1]
RULES = ["Be brief."]


class Server(http.server.ThreadingHTTPServer):
    """Answers a question with `respond(question)`: a text, a status code, or a number of seconds to dribble bytes."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("localhost", 0), Handler)
        self.respond, self.asked = None, []

    def handle_error(self, request, client_address):
        """Ignore clients that stopped reading."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        found = self.server.respond(body["question"])
        if isinstance(found, int):
            self.send_error(found)
            return
        text = "cut" if found is None else found
        content = json.dumps({"answer": text, "complete": found is not None}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) if isinstance(text, str) else 100))
        self.end_headers()
        if isinstance(text, float):
            for _ in range(100):  # Always active, so that only a deadline on the whole request ends it.
                self.wfile.write(b" ")
                time.sleep(text / 100)
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def judge(server, tmp_path, monkeypatch):
    """A function that makes the page's judge, with the server's address."""
    monkeypatch.setenv("JUDGE_URL", f"http://localhost:{server.server_address[1]}/answer")
    monkeypatch.setenv("JUDGE_SECONDS", "1")
    (tmp_path / "judge.py").write_text(CODE, encoding="utf-8")
    return lambda **fields: ja.Judge(f"{tmp_path / 'judge.py'}:Judge", RULES, reasoning=False, **fields)


def test_it_compares_in_both_orders(server, judge):
    server.respond = lambda question: "A\n" if "Response A: short\n" in question else "B"
    [found] = judge().compare(["Hi there"], ["short"], ["a longer one"])
    assert (found.label_ab, found.label_ba, found.decided) == (1.0, 1.0, True)
    questions = [body["question"] for body in server.asked]
    assert len(questions) == 2 and all("user: Hi there" in question and "Be brief." in question for question in questions)


@pytest.mark.medium
def test_it_rates_criticises_and_revises(server, judge):
    server.respond = lambda question: ("8" if "Rate this" in question else
                                       "better" if "Critique: too long" in question else "too long")
    assert judge().rate(["Hi"] * 20, ["a"] * 20).tolist() == [8.0] * 20
    assert [row.revision for row in judge().revise(["Hi"], ["a"])] == ["better"]


def test_a_text_that_the_server_cut_off_is_incomplete(server, judge):
    server.respond = lambda question: None
    assert [row.complete for row in judge().revise(["Hi"], ["a"])] == [False]


def test_an_answer_that_is_no_option_gives_no_verdict(server, judge):
    server.respond = lambda question: "Both are fine."
    [found] = judge().compare(["Hi"], ["a"], ["b"])
    assert (found.label_ab, found.decided, found.label) == (None, False, 0.5)
    assert [str(x) for x in judge().rate(["Hi"], ["a"])] == ["nan"]


def test_a_server_that_is_busy_for_a_moment_is_asked_again(server, judge):
    codes = iter([503, 503])
    server.respond = lambda question: next(codes, "A")
    assert judge().compare(["Hi"], ["a"], ["b"])[0].label_ab == 1.0
    assert len(server.asked) == 4  # The first order three times, the second once.


def test_a_request_that_always_fails_is_set_aside(server, judge):
    server.respond = lambda question: 500 if "assistant: bad" in question else "7"
    found = judge(retries=1, max_failed_share=0.5).rate(["Hi"] * 3, ["a", "bad", "b"])
    assert [str(x) for x in found] == ["7.0", "nan", "7.0"]
    with pytest.raises(ja.UserError, match=r"answer 1 of the first 2 .*HTTP Error 500.*Judge\(max_failed_share\) \(0.05\)"):
        judge(retries=1).rate(["Hi"] * 3, ["a", "bad", "b"])


def test_a_server_that_answers_slowly_meets_the_deadline(server, judge):
    server.respond = lambda question: 10.0
    began = time.monotonic()
    with pytest.raises(ja.UserError, match="did not finish its answer within 1 s"):
        judge(retries=0).rate(["Hi"], ["a"])
    assert time.monotonic() - began < 5


def test_the_table_lists_every_field_of_every_record():
    stated, record = collections.defaultdict(list), None
    [rows] = tables(SECTION)
    for row in rows:
        record = (re.findall(r"`(\w+)`", row["record"]) or [record])[0]
        stated[record] += re.findall(r"`(\w+)`", row["field"])
    kinds = [getattr(records, name) for name in ("CritiqueRequest", "RevisionRequest", "ComparisonRequest", "RatingRequest",
                                                 "Draw", "Text", "Verdict", "Rating")]
    for kind in (*kinds, Message, Principle):
        assert sorted(stated.pop(kind.__name__)) == sorted(kind.__annotations__), kind
    assert not stated


def test_the_page_lists_every_problem():
    sentence = re.search(r"`problem` is one of(.*?)\(`PROBLEMS`", SECTION, re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", sentence) == list(PROBLEMS)
