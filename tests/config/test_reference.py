"""The config fields in the help of `train`."""

from __future__ import annotations

import pytest

from jaxalign import train
from jaxalign.config import Config, reference, schema
from jaxalign.errors import UserError


def test_every_field_has_one_line():
    lines = [line for line in reference.listing(Config()).splitlines() if line.startswith("  --")]
    assert sorted(line.partition("=")[0] for line in lines) == sorted(f"  --config.{name}" for name in schema.flatten(Config()))


def test_a_section_includes_inner_sections_and_no_other():
    listed = reference.listing(Config(), "ppo")
    assert "\nconfig.ppo.alarms: " in listed and "--config.ppo.alarms.every=0  int. " in listed
    assert "config.preference" not in {line.partition(":")[0] for line in listed.splitlines()}
    assert listed == reference.listing(Config(), "config.ppo")


def test_a_field_has_its_type_default_and_limits():
    assert reference.listing(Config(), "mesh.data").splitlines()[-1] == (
        "  --config.mesh.data=1  int. Number of ways to split the batch; each part has a full copy of the parameters. "
        "Must be at least 1.")


def test_an_unknown_section_gets_a_suggestion(capsys):
    with pytest.raises(UserError, match="--help=pppo: config.pppo is not a field of config; did you mean ppo"):
        reference.listing(Config(), "pppo")
    assert train.main(["train", "--help=pppo"]) == 2
    assert train.main(["train", "--help=mesh"]) == 0 and "config.mesh.fsdp=1" in capsys.readouterr().out
    assert train.main(["train", "-h"]) == 0 and "config.mesh.fsdp" not in capsys.readouterr().out
