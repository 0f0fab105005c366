"""The written config: equal to the one that was checked, and suited to the size of the model."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import pytest

from jaxalign import train
from jaxalign.config import from_config_dict
from jaxalign.starter.checks import _sharded
from jaxalign.starter.facts import BASE, CHAT, MARKED, THINKS, ModelFacts
from jaxalign.starter.files import write_config
from jaxalign.starter.memory import cluster_of, fit, these_devices
from jaxalign.starter.settings import STORAGES, StarterChoice, lengths, make_config, template_sets
from tests.folders import write_model


def facts(**changes) -> ModelFacts:
    return dataclasses.replace(ModelFacts(pathlib.Path("/models/x"), "llama", 1_000_000, 4096, CHAT), **changes)


@pytest.mark.parametrize("kind", [BASE, CHAT, THINKS, MARKED])
def test_the_file_gives_the_config_that_was_checked(tmp_path, kind):
    model = facts(kind=kind, parameters=500_000_000, positions=320)
    sets = template_sets(model)
    choices = [(sets[0], storage, False, ()) for storage in STORAGES] + [(sets[-1], STORAGES[0], True, ("grown", "cut_off"))]
    for place, values in enumerate(choices):
        folder = tmp_path / str(place)
        folder.mkdir()
        write_config(folder, model, StarterChoice(*values), folder)
        read = train.read_arguments(["train", f"--config={folder / 'config.py'}"])[0]
        assert read == make_config(model, StarterChoice(*values), folder)


def test_a_rehearsal_keeps_the_scores_of_answers_that_do_not_end():
    """Otherwise RL would replace the scores of all answers of a model whose revisions do not end."""
    for keep, rule in (((), "replace"), (("grown",), "replace"), (("grown", "cut_off"), "none")):
        choice = StarterChoice("transcript", STORAGES[0], True, keep)
        assert make_config(facts(kind=BASE), choice, pathlib.Path()).ppo.missing_eos == rule


@pytest.mark.parametrize("kind", [BASE, CHAT])
def test_a_config_for_several_devices_is_that_for_one_and_a_mesh(tmp_path, kind):
    model = facts(kind=kind)
    one, eight = (make_config(model, StarterChoice(template_sets(model)[0], devices=count), tmp_path) for count in (1, 8))
    assert (one.mesh.fsdp, eight.mesh.fsdp, eight.sft.batch_rows) == (1, 8, 8)
    sft = dataclasses.replace(eight.sft, batch_rows=one.sft.batch_rows)
    assert dataclasses.replace(eight, mesh=one.mesh, sft=sft) == one
    write_config(tmp_path, model, StarterChoice(template_sets(model)[0], devices=8), tmp_path)
    assert train.read_arguments(["train", f"--config={tmp_path / 'config.py'}"])[0] == eight


# The tiny model has width 16, and 6 and 12 have no power of 2 above 2 and 4 as a divisor.
@pytest.mark.parametrize(("embed", "devices"), [(16, 8), (12, 4), (6, 2)])
def test_the_mesh_has_as_many_devices_as_divide_the_model(tmp_path, embed, devices):
    folder = write_model(tmp_path / "model", max_length=1024, embed=embed)
    for platform in ("gpu", "tpu"):
        cluster = cluster_of("c", platform, 1e9, 8)
        choice, found = _sharded(facts(folder=folder, positions=1024), tmp_path, STORAGES[0], cluster)
        assert choice.devices == found.devices == devices and f"each of {devices} devices of c" in found.sentence()


def test_a_name_with_quotes_is_written(tmp_path):
    model = facts(folder=pathlib.Path('/models/a"""b\\c'))
    write_config(tmp_path, model, StarterChoice("chat"), pathlib.Path('it"s'))
    assert train.read_arguments(["train", f"--config={tmp_path / 'config.py'}"])[0].model.path == '/models/a"""b\\c'


def test_the_lengths_leave_space_for_a_revision():
    """It shows the prompt, the answer and the critique, and is as long as they are."""
    for kind, positions in itertools.product((BASE, CHAT, THINKS), (256, 512, 1024, 8192, 131072)):
        longest, new = lengths(facts(kind=kind, positions=positions))
        assert longest <= min(positions, 1024) and 4 * new <= longest


def test_small_models_keep_the_default_rates_and_large_ones_get_low_ones():
    usual = from_config_dict({})
    small, large = (make_config(facts(parameters=n), StarterChoice("chat"), pathlib.Path()) for n in (10**6, 7 * 10**9))
    assert small.sft.optimizer == usual.sft.optimizer and small.ppo.optimizer == usual.ppo.optimizer
    rates = [large.sft.optimizer, large.preference.optimizer, large.ppo.optimizer, large.ppo.critic_optimizer]
    assert [one.learning_rate for one in rates] == [1e-5, 1e-5, 1e-6, 1e-5]
    adapters = make_config(facts(parameters=7 * 10**9), StarterChoice("chat", STORAGES[1]), pathlib.Path())
    assert adapters.lora.rank == 16 and adapters.sft.optimizer.learning_rate == 1e-4


def test_the_memory_of_a_run_has_at_least_its_weights(tmp_path):
    """PPO holds policy, critic, reference and preference model in float32, and two moments of the first two."""
    folder = write_model(tmp_path / "model", max_length=1024)
    model = facts(folder=folder, positions=1024)
    found = fit(make_config(model, StarterChoice("chat"), tmp_path), cluster_of("c", "cpu", 1e9, 1))
    weights = 2 * (16 * (4 + 2 + 2) * 4 + 16 * 16 + 3 * 16 * 20)  # Attention and MLP of two layers, without tables and norms.
    assert found.peak > 4 * weights * (4 + 2 * 2) and found.fits
    assert not fit(make_config(model, StarterChoice("chat"), tmp_path), cluster_of("c", "cpu", 1e3, 1)).fits
    assert 1e8 < these_devices().usable < 1e14
