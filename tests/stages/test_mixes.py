"""The share of helpful prompts that stages compare and ppo work on."""

from __future__ import annotations

import collections
import json

import pytest

from jaxalign.config import from_config_dict
from jaxalign.data.sources.prompts import mixed
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.breakdown import prompt_shares
from jaxalign.stages.shared.sources import held_out_helpful, prompt_sets, stage_prompts
from tests.feedback.fakes import WordTokenizer


def made(kind: str, count: int, **columns) -> list[Prompt]:
    return [Prompt(f"{kind}-{i}", (Message("user", f"{kind} question {i}"),), kind, columns) for i in range(count)]


@pytest.mark.parametrize(
    ("others", "helpful", "share", "count", "numbers"),
    [
        (100, 100, 0.25, 40, (30, 10)),
        (100, 100, 0.5, 7, (3, 4)),  # 3.5 is rounded to an even number
        (100, 5, 0.25, 40, (15, 5)),  # too few helpful prompts for 40
        (6, 100, 0.25, 40, (6, 2)),  # too few others
        (10, 10, 0.0, 40, (10, 0)),
        (10, 10, 1.0, 40, (0, 10)),
    ],
)
def test_the_share_holds_even_if_prompts_are_few(others, helpful, share, count, numbers):
    found = mixed(made("red_team", others), made("helpful", helpful), share, count, "config.ppo.helpful_share")
    counts = collections.Counter(prompt.source for prompt in found)
    assert (counts["red_team"], counts["helpful"]) == numbers
    assert len({prompt.id for prompt in found}) == len(found)


def test_every_prefix_has_about_the_share():
    found = mixed(made("red_team", 90), made("helpful", 30), 0.25, 100, "field")
    for end in range(1, 101):
        assert abs(sum(prompt.source == "helpful" for prompt in found[:end]) - end / 4) <= 1


def test_a_share_without_prompts_or_with_other_columns_is_refused():
    with pytest.raises(UserError, match="ppo.helpful_share is 0.5, but no helpful prompts are left"):
        mixed(made("red_team", 4), [], 0.5, 4, "config.ppo.helpful_share")
    with pytest.raises(UserError, match=r"have columns that those of data.helpful lack \(answer\)"):
        mixed(made("rl", 4, answer="1"), made("helpful", 4), 0.5, 4, "config.ppo.helpful_share")


@pytest.fixture
def context(tmp_path):
    """Makes the context of stage ppo of a run on files with 24 red-team and 16 helpful prompts, of which 8 are held out."""
    (tmp_path / "red.txt").write_text("".join(f"red question {i}\n" for i in range(24)))
    (tmp_path / "good.txt").write_text("".join(f"good question {i}\n" for i in range(16)))
    (tmp_path / "rl.jsonl").write_text("".join(json.dumps({"prompt": f"other question {i}"}) + "\n" for i in range(10)))

    def make(ppo: dict, **data) -> StageContext:
        (tmp_path / "ppo").mkdir(exist_ok=True)
        data = {"source": "prompts_jsonl", "red_team": str(tmp_path / "red.txt"), "style": "hh"} | {
            name: str(tmp_path / file) for name, file in data.items()}
        config = from_config_dict({"stages": ("ppo",), "data": data, "ppo": ppo,
                                   "model": {"source": "huggingface", "path": "x"},
                                   "reward": {"source": "callable", "callable": "a.py:b"}})
        return StageContext(config, tmp_path, tmp_path / "ppo", False)

    return make


def sources_of(context, **more):
    found = stage_prompts(context, WordTokenizer(), "ppo", "rl", **more)
    return collections.Counter(prompt.source for prompt in found), {prompt.messages for prompt in found}


def test_without_a_share_the_mix_is_that_of_the_files(context):
    counts, _ = sources_of(context({"prompts": 100}, helpful="good.txt"))
    assert counts["red_team"] + counts["helpful"] == 32 and counts["helpful"] > 0


def test_a_share_mixes_helpful_prompts_into_those_of_rl(context):
    counts, _ = sources_of(context({"prompts": 8, "helpful_share": 0.25}, helpful="good.txt", rl="rl.jsonl"))
    assert counts["helpful"] == 2 and sum(counts.values()) == 8 and counts["red_team"] == 0


@pytest.mark.parametrize("share", [None, 0.5])
def test_prompts_measured_by_alarms_are_not_trained_on(context, share):
    made = context({"prompts": 100, "helpful_share": share, "alarms": {"every": 2, "prompts": 3}}, helpful="good.txt")
    measured = held_out_helpful(made, WordTokenizer(), prompt_sets(made, WordTokenizer()))
    counts, dialogues = sources_of(made, without=measured)
    assert len(measured) == 3 and {prompt.source for prompt in measured} == {"helpful"} and counts["helpful"] > 0
    assert not dialogues & {prompt.messages for prompt in measured}


def test_a_mix_of_red_team_prompts_only_is_warned_about(context, capsys):
    made = context({}, helpful="good.txt")
    assert prompt_shares(made, ["red_team"] * 3 + ["helpful"]) == {"prompt_shares": {"helpful": 0.25, "red_team": 0.75}}
    assert "warning" not in capsys.readouterr().out
    prompt_shares(made, ["red_team"] * 4)
    assert "warning: all 4 prompts are red-team prompts" in capsys.readouterr().out


def test_alarms_need_helpful_prompts(context):
    with pytest.raises(UserError, match="alarms.every is 2, which needs helpful prompts, but config.data.helpful is empty"):
        context({"alarms": {"every": 2}})
    with pytest.raises(UserError, match="needs helpful prompts, but config.data.source 'arithmetic' has none: set it to"):
        from_config_dict({"stages": ("ppo",), "data": {"source": "arithmetic"}, "reward": {"source": "verifier"},
                          "ppo": {"alarms": {"every": 2}}})
