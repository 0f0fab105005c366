"""configs/stories_hh.py fits the schema, and its error names the missing paths."""

from __future__ import annotations

import pathlib
import runpy

import pytest

from jaxalign.config import from_config_dict
from jaxalign.errors import UserError

_FILE = pathlib.Path(__file__).resolve().parents[1] / "configs" / "stories_hh.py"


def _values(path: str = "", train: str = ""):
    values = runpy.run_path(str(_FILE))["get_config"]()
    values.model.path, values.data.train = path, train
    return values


def test_with_its_paths_it_is_a_config_of_five_stages():
    config = from_config_dict(_values("folder", "pairs.jsonl.gz"))
    assert config.stages == ("sft", "preference", "ppo", "evaluate", "report")
    assert (config.model.source, config.data.source) == ("huggingface", "preferences_jsonl")


@pytest.mark.parametrize(
    ("path", "train", "message"),
    [
        ("", "pairs.jsonl", r"config\.model\.path is empty; set it to the folder with config\.json"),
        ("folder", "", r"config\.data\.train is empty; set it to a JSONL file"),
    ],
)
def test_without_a_path_the_error_says_what_to_provide(path, train, message):
    with pytest.raises(UserError, match=message):
        from_config_dict(_values(path, train))
