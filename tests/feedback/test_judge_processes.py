"""A judge in two processes: a judge of the user's own is called on the first one only, a judge on the devices on both."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import jax
import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.feedback.judge import ComparisonRequest, Draw, RatingRequest, RevisionRequest
from jaxalign.parallel import distributed, hosts
from jaxalign.records import Message
from jaxalign.stages.shared import judges
from jaxalign.stages.shared.base import StageContext
from tests import processes
from tests.feedback.fakes import PRINCIPLES

pytestmark = pytest.mark.process

LONG = 6_000_000  # More characters than a message of gRPC may have by default (4 MiB).
JUDGE = f"""
import os, pathlib
from jaxalign.feedback.judge import Rating, Text, Verdict
from jaxalign.registry.judges import JudgeRecord

def note(line):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as file:
        file.write(f"{{os.getpid()}} {{line}}\\n")

class Counting:
    def __init__(self):
        note("made")

    def compare(self, requests, draw):
        for request, row in zip(requests, draw.rows):
            note(f"compare {{row}} {{request.first}}")
        return [Verdict(len(r.first) / 10, f"why {{os.getpid()}}") if r.first else None for r in requests]

    def revise(self, requests, draw):
        return [Text("é" + "x" * {LONG}) for _ in requests]

    def rate(self, requests, draw):
        raise OSError(f"no server for {{os.getpid()}}")

DEVICES = JudgeRecord("devices", lambda inputs: Counting(), on_devices=True)
"""


def program() -> None:
    """The program of each of two processes; each writes its observations."""
    group, (folder,) = distributed.take_flags(sys.argv[1:])
    folder, turn = pathlib.Path(folder), (Message("user", "Hi"),)
    with distributed.running(group, lambda error: (str(error), 2)):
        seen, draw = {}, Draw(jax.random.key(0), range(5, 8))
        for name in ("Counting", "DEVICES"):
            own = {"feedback": {"judge": f"{folder / 'judge.py'}:{name}"}}
            config = from_config_dict({"stages": ("pretrain", "compare")} | own)
            context = StageContext(config, folder, folder / "compare", False)
            judge = judges.make_judge(context, "compare", None, 8)
            requests = [ComparisonRequest(turn, first, "b", PRINCIPLES[0]) for first in ("a", "", "aaa")]
            seen[name] = judge.compare(requests, draw)
            if name == "Counting":
                with judge.loaded() as loaded:
                    revised = loaded.revise([RevisionRequest(turn, "a", PRINCIPLES[0], "c")], Draw(draw.key, [0]))
                seen["length"], seen["letter"] = len(revised[0].text), revised[0].text[0]
                try:
                    judge.rate([RatingRequest(turn, "a", PRINCIPLES[0])], Draw(draw.key, [0]))
                except UserError as error:
                    seen["error"] = str(error)
        (folder / f"{hosts.index()}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(the observations of each process, the lines that the judges wrote)"""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "judge.py").write_text(JUDGE)
    processes.run_well(2, ["-c", f"from {__name__} import program; program()", str(folder)])
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)], (folder / "calls").read_text().splitlines()


def test_a_judge_of_the_users_own_is_made_and_called_in_one_process_once_for_each_request(pair):
    (first, second), calls = pair
    assert first["Counting"] == second["Counting"]
    assert [row[0] for row in first["Counting"]] == [0.1, None, 0.3] and first["Counting"][1][2] == "none"
    lines = [line.split(" ", 1) for line in calls]
    process = first["Counting"][0][1].removeprefix("why ")
    expected = ["made", "compare 5 a", "compare 6 ", "compare 7 aaa"]
    assert [line for owner, line in lines if owner == process] == expected * 2  # The second time as the judge on the devices.


def test_a_judge_on_the_devices_is_called_in_every_process(pair):
    (first, second), calls = pair
    reasons = {seen["DEVICES"][0][1] for seen in (first, second)}
    assert len(reasons) == 2 and {f"why {line.split()[0]}" for line in calls} == reasons


def test_both_processes_get_a_long_text_and_an_error(pair):
    for seen in pair[0]:
        assert (seen["length"], seen["letter"]) == (1 + LONG, "é")
        message = r"failed to answer 1 of 1 requests to 'rate' \(it raised OSError at .*\.py:\d+ in 'rate': no server for"
        assert re.search(message, seen["error"])
