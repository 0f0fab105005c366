"""A user's sampler, from a file outside the package."""

from __future__ import annotations

import pathlib
import shutil

import jax
import pytest

import jaxalign as ja
from jaxalign.config import Checks, from_config_dict
from jaxalign.errors import UserError
from jaxalign.registry.samplers import SAMPLERS, SamplerRecord
from jaxalign.rollout.sampler import Engine, make_sampler, respond
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.folders import write_model
from tests.small_run import rows, run

pytestmark = pytest.mark.usefixtures("few_sampling_programs")

PLUGIN = pathlib.Path(__file__).parent / "plugins" / "sampler.py"
NAME = f"{PLUGIN}:Remembering"


def test_a_sampler_of_a_file_answers_and_follows_updates():
    engine, params = Engine(tiny.model(), 4, 32, 8), tiny.place(tiny.model(), tiny.host_params(scale=1.5))
    sampler = make_sampler(NAME, engine, "config.sampler")
    given = tiny.PROMPTS, jax.random.key(0), range(len(tiny.PROMPTS)), Sampling(8, tiny.STOPS)
    for version in range(2):
        sampler.update(params, version)
        first, again = (respond(sampler, *given) for _ in range(2))
        expected = tiny.respond(engine, params, given[0], given[1], given[3], given[2])
        assert first == again and [r.ids for r in first] == [r.ids for r in expected]
        assert {v for r in first for v in r.versions} == {version}


def test_a_registered_sampler_is_found_by_name():
    record = SamplerRecord("remembering", NAME)
    assert SAMPLERS.register(record) is record
    try:
        assert type(make_sampler("remembering", Engine(tiny.model(), 4, 32, 8))).__name__ == "Remembering"
        with pytest.raises(UserError, match="'local' is already registered"):
            SAMPLERS.register(SamplerRecord("local", NAME))
    finally:
        SAMPLERS.unregister("remembering")


@pytest.mark.slow
def test_stages_sample_with_it(done, tmp_path):
    """It returns the local sampler's responses, so the stages write the same files."""
    stages = ("pretrain", "revise", "sft", "compare", "preference", "ppo", "evaluate")
    for name in stages[:5]:
        shutil.copytree(done / name, tmp_path / name)
    run(tmp_path, stages=stages, sampler=NAME)
    assert rows(tmp_path, "evaluate") == rows(done, "evaluate")
    assert (tmp_path / "ppo" / "metrics.jsonl").read_bytes() == (done / "ppo" / "metrics.jsonl").read_bytes()


def test_a_config_without_a_stage_that_samples_refuses_it():
    with pytest.raises(UserError, match=r"no stage of this run uses it.*one of reward_distill, best_of_n, online_dpo, ppo"):
        from_config_dict({"stages": ("pretrain",), "sampler": NAME})
    with pytest.raises(UserError, match="config.sampler names .*, which is not a sampler"):
        from_config_dict({"sampler": f"{PLUGIN.with_name('judge.py')}:Brevity"})


@pytest.mark.slow
def test_ppo_samples_with_it_by_name(tmp_path):
    def lengths(prompts, responses, **columns):
        return [len(text) for text in responses]

    policy, scores = ja.load_model(write_model(tmp_path / "hf")), []
    for sampler in (None, NAME):
        fields = {"iterations": 2, "batch": 4, "minibatches": 1, "epochs": 1, "max_new_tokens": 8,
                  "checks": Checks(step_zero=False)}
        trainer = ja.PPO(policy, lengths, sampler=sampler, **fields)
        scores.append([step.metrics["score"] for step in trainer.fit(["the cat", "a dog"])])
    assert scores[0] == scores[1]
    with pytest.raises(UserError, match=r"PPO\(sampler\) is 'remote'; one of local"):
        next(ja.PPO(policy, lengths, sampler="remote").fit(["the cat"]))
