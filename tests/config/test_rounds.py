"""config.rounds: which stages are repeated, and where each round is."""

from __future__ import annotations

import pytest

from jaxalign.config import from_config_dict, rounds
from jaxalign.errors import UserError

FILES = {"data": {"source": "preferences_jsonl", "train": "a.jsonl"}, "model": {"source": "huggingface", "path": "x"}}


@pytest.mark.parametrize(("stages", "reward", "expected"), [
    (("sft", "compare", "preference", "ppo", "evaluate"), "preference", ("compare", "preference", "ppo")),
    (("compare", "preference", "best_of_n", "dpo"), "preference", ("compare", "preference", "best_of_n", "dpo")),
    (("sft", "compare", "preference", "evaluate"), "preference", ()),  # No policy learns from the labels.
    (("sft", "ppo", "evaluate"), "ai_feedback", ("ppo",)),
    (("sft", "ppo", "evaluate"), "verifier", ()),  # The verifier's scores are no labels.
    (("sft", "online_dpo"), "preference", ("online_dpo",)),
])
def test_a_round_repeats_the_stages_from_the_labels_to_the_last_policy(stages, reward, expected):
    assert rounds.repeated(stages, reward) == expected


def test_the_later_rounds_run_before_the_evaluation():
    config = from_config_dict({"rounds": 3})
    assert rounds.folders(config) == (
        "pretrain", "revise", "sft", "compare", "preference", "ppo", "round-2/compare", "round-2/preference", "round-2/ppo",
        "round-3/compare", "round-3/preference", "round-3/ppo", "evaluate", "report",
    )
    assert rounds.later_policies(config) == ("round-2/ppo", "round-3/ppo")
    assert rounds.folders(from_config_dict({"rounds": 1})) == from_config_dict({}).stages


def test_a_round_starts_from_the_last_policy_of_the_round_before():
    config = from_config_dict({"rounds": 3, "stages": ("pretrain", "sft", "compare", "preference", "dpo", "ppo")})
    assert rounds.start_of(config, "compare") == ""
    assert rounds.start_of(config, "round-2/compare") == "ppo"
    assert rounds.start_of(config, "round-3/dpo") == "round-2/ppo"
    assert rounds.start_of(config, "round-3/ppo") == ""  # It starts from the dpo of its own round.
    assert rounds.inputs_of(config, "round-3/ppo")["dpo"] == "round-3/dpo"


def test_a_label_names_the_round():
    assert rounds.label("compare") == "compare"
    assert rounds.label("round-12/compare") == "compare, round 12"
    assert rounds.parse("round-0/compare") == ("round-0/compare", 1)


def test_the_work_directory_of_a_round_contains_its_folder(tmp_path):
    assert rounds.workdir_of(tmp_path / "round-2" / "ppo") == tmp_path
    (tmp_path / "round-2").mkdir()
    (tmp_path / "round-2" / "config.json").write_text("{}")  # A run whose work directory has this name.
    assert rounds.workdir_of(tmp_path / "round-2" / "ppo") == tmp_path / "round-2"


@pytest.mark.parametrize("values", [
    {"stages": ("pretrain", "sft", "evaluate")},
    {"stages": ("sft", "preference", "ppo"), **FILES},
])
def test_rounds_without_new_labels_are_refused(values):
    assert from_config_dict(values)
    with pytest.raises(UserError, match="config.rounds is 2, but no stage of this run trains a policy on new labels"):
        from_config_dict(values | {"rounds": 2})


def test_the_number_of_rounds_is_at_least_one():
    with pytest.raises(UserError, match="config.rounds"):
        from_config_dict({"rounds": 0})
