"""Old names of fields stay valid in config files, on the command line and in manifests."""

import pytest

from jaxalign.config import default_config, from_config_dict, renames
from jaxalign.train import read_arguments

NEW = ("ratio", "sampler_gap", "reference_kl", "micro_batches")


@pytest.fixture(autouse=True)
def lines(capsys):
    """Capture the printed sentences. Each is printed once per process, so forget those printed by earlier tests."""
    renames.report.cache_clear()
    return lambda: capsys.readouterr().out.splitlines()


def test_an_old_name_in_a_mapping_sets_the_new_fields_and_leaves_the_mapping_unchanged(lines):
    values = {"ppo": {"on_sampler_gap": "recompute"}}
    checks = from_config_dict(values).ppo.checks
    assert [getattr(checks, name) for name in NEW] == ["recompute", "recompute", "warn", "warn"]
    assert values == {"ppo": {"on_sampler_gap": "recompute"}}
    from_config_dict(values)
    assert lines() == ["config.ppo.on_sampler_gap is now called config.ppo.checks.ratio, config.ppo.checks.sampler_gap, "
                       "config.ppo.checks.reference_kl, config.ppo.checks.micro_batches; the old name still works"]


def test_an_old_name_works_in_a_config_file_and_on_the_command_line(tmp_path, lines):
    path = tmp_path / "old.py"
    path.write_text("from jaxalign.config import default_config\ndef get_config():\n    config = default_config()\n"
                    "    config.ppo.on_sampler_gap = 'stop'\n    return config\n")
    config = read_arguments(["train", f"--config={path}"])[0]
    assert {getattr(config.ppo.checks, name) for name in NEW} == {"stop"}
    config = read_arguments(["train", f"--config={path}", "--config.ppo.on_sampler_gap=recompute"])[0]
    assert [getattr(config.ppo.checks, name) for name in NEW] == ["recompute", "recompute", "warn", "warn"]
    config = read_arguments(["train", f"--config={path}", "--config.ppo.checks.ratio", "warn"])[0]
    assert config.ppo.checks.ratio == "warn" and config.ppo.checks.sampler_gap == "stop"
    assert len(lines()) == 1


def test_a_field_that_is_no_longer_read_is_dropped_with_a_remedy(lines):
    values = default_config()
    values.ppo.micro_batches = 4
    assert from_config_dict(values).ppo.micro_batch_tokens == 0
    assert "config.ppo.micro_batches no longer has an effect: set ppo.micro_batch_tokens" in lines()[0]
    assert values.ppo.micro_batches == 4


def test_a_manifest_with_old_names_compares_equal_to_the_defaults():
    old = {"ppo.on_sampler_gap": "warn", "ppo.micro_batches": 2, "ppo.clip": 0.2}
    assert renames.leaves_with_current_names(old) == {"ppo.clip": 0.2} | {f"ppo.checks.{name}": "warn" for name in NEW}


def test_an_unset_clip_compares_equal_to_the_range_of_its_policy_loss():
    old = {"ppo.policy_loss": "clip", "ppo.clip": 0.2, "ppo.clip_high": None}
    assert renames.effective(old) == renames.effective(old | {"ppo.clip": None})
    gspo = old | {"ppo.policy_loss": "gspo"}
    assert renames.effective(gspo)["ppo.clip"] == 0.2
    assert renames.effective(gspo | {"ppo.clip": None}) == gspo | {"ppo.clip": 3e-4, "ppo.clip_high": 4e-4}
