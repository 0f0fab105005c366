"""A damaged config or manifest of a finished run is refused in a sentence."""

from __future__ import annotations

import json

import pytest

from jaxalign.config import Config, to_dict
from jaxalign.config.finished import finished_stage
from jaxalign.errors import UserError


def finished(workdir, manifest=None, **config):
    """The folder of a finished stage sft."""
    folder = workdir / "sft"
    folder.mkdir()
    (workdir / "config.json").write_text(json.dumps(to_dict(Config()) | config))
    recorded = {"stage": "sft", "status": "done", "config": {"model.embed": 16}} | (manifest or {})
    (folder / "manifest.json").write_text(json.dumps(recorded))
    return folder


def test_the_config_has_the_values_with_which_the_stage_ran(tmp_path):
    assert finished_stage(finished(tmp_path)).config.model.embed == 16


@pytest.mark.parametrize("model", [7, None, [1], "x"])
def test_a_section_that_is_no_object_is_refused(tmp_path, model):
    with pytest.raises(UserError, match="config.json has no section model; the file was edited or damaged"):
        finished_stage(finished(tmp_path, model=model))


@pytest.mark.parametrize("config", [7, None, ["model.embed"]])
def test_a_manifest_without_the_fields_of_its_stage_is_refused(tmp_path, config):
    with pytest.raises(UserError, match="manifest.json is damaged"):
        finished_stage(finished(tmp_path, {"config": config}))
