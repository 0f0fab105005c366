"""Options that the chosen kind reads are accepted; an option that it does not read is refused with one form of sentence."""

import dataclasses

import pytest

from jaxalign.config import Config, default_config, from_config_dict, reset_unread, schema
from jaxalign.errors import UserError
from jaxalign.registry.advantages import ADVANTAGES
from jaxalign.registry.data_sources import DATA_SOURCES
from jaxalign.registry.objectives import OBJECTIVES
from jaxalign.registry.policy_losses import POLICY_LOSSES
from jaxalign.registry.rewards import REWARDS

GROUPS = {"advantages": "grpo", "group_size": 2}
CHECKPOINT = {"source": "huggingface", "path": "folder"}
SUMS = {"stages": ("pretrain", "ppo"), "data": {"source": "arithmetic"}, "reward": {"source": "verifier"}}
PAIRS = {"stages": ("dpo",), "data": {"source": "preferences_jsonl", "train": "pairs.jsonl"}}


@pytest.mark.parametrize("values, field, selector", [
    ({"ppo": GROUPS | {"gamma": 0.9}}, "ppo.gamma is 0.9", "ppo.advantages is 'grpo'"),
    ({"ppo": GROUPS | {"lam": 0.9}}, "ppo.lam is 0.9", "ppo.advantages is 'grpo'"),
    ({"ppo": {"group_scale": "none"}}, "ppo.group_scale is 'none'", "ppo.advantages is 'gae'"),
    ({"ppo": GROUPS | {"value_clip": None}}, "ppo.value_clip is None", "ppo.advantages is 'grpo'"),
    ({"ppo": GROUPS | {"critic_optimizer": {"b1": 0.5}}}, "ppo.critic_optimizer.b1 is 0.5", "ppo.advantages is 'grpo'"),
    ({"ppo": {"critic": "shared", "critic_optimizer": {"b1": 0.5}}}, "ppo.critic_optimizer.b1 is 0.5",
     "ppo.critic is 'shared'"),
    ({"ppo": {"huber_delta": 2.0}}, "ppo.huber_delta is 2.0", "ppo.value_loss is 'squared'"),
    ({"ppo": {"policy_loss": "gspo", "dual_clip": 3.0}}, "ppo.dual_clip is 3.0", "ppo.policy_loss is 'gspo'"),
    ({"ppo": {"kl_target": 1.0}}, "ppo.kl_target is 1.0", "ppo.kl_controller is 'fixed'"),
    ({"ppo": {"kl_horizon": 500}}, "ppo.kl_horizon is 500", "ppo.kl_controller is 'fixed'"),
    ({"ppo": {"missing_eos": "zero", "missing_eos_value": 1.0}}, "ppo.missing_eos_value is 1.0", "ppo.missing_eos is 'zero'"),
    ({"ppo": {"correction_level": "sequence"}}, "ppo.correction_level is 'sequence'", "ppo.sampler_correction is 'none'"),
    ({"sft": {"optimizer": {"kind": "adafactor", "b2": 0.5}}}, "sft.optimizer.b2 is 0.5",
     "sft.optimizer.kind is 'adafactor'"),
    ({"sft": {"optimizer": {"kind": "lion", "eps_inside": True}}}, "sft.optimizer.eps_inside is True",
     "sft.optimizer.kind is 'lion'"),
    ({"lora": {"dora": True}}, "lora.dora is True", "lora.rank is 0"),
    ({"mesh": {"zero": 1}}, "mesh.zero is 1", "mesh.fsdp is 1"),
    ({"mesh": {"pipeline_repeats": 2}}, "mesh.pipeline_repeats is 2", "mesh.pipeline is 1"),
    ({"model": {"remat_saves": "products"}}, "model.remat_saves is 'products'", "model.remat is False"),
    ({"model": {"path": "folder"}}, "model.path is 'folder'", "model.source is 'scratch'"),
    ({"model": CHECKPOINT | {"layers": 2}}, "model.layers is 2", "model.source is 'huggingface'"),
    ({"model": CHECKPOINT | {"rope_base": 5e5}}, "model.rope_base is 500000.0", "model.source is 'huggingface'"),
    ({"model": CHECKPOINT | {"norm_eps": 1e-6}}, "model.norm_eps is 1e-06", "model.source is 'huggingface'"),
    ({"model": CHECKPOINT | {"tie_embeddings": False}}, "model.tie_embeddings is False", "model.source is 'huggingface'"),
    ({"model": {"load_balance_coef": 0.1}}, "model.load_balance_coef is 0.1", "model.source is 'scratch'"),
    ({"model": CHECKPOINT, "world": {"tokens": 20_000}}, "world.tokens is 20000", "model.source is 'huggingface'"),
    ({"model": CHECKPOINT, "world": {"vocab_size": 400}}, "world.vocab_size is 400", "model.source is 'huggingface'"),
    (SUMS | {"world": {"vocab_size": 400}}, "world.vocab_size is 400", "data.source is 'arithmetic'"),
    (SUMS | {"world": {"topics": 40}}, "world.topics is 40", "data.source is 'arithmetic'"),
    (PAIRS | {"model": CHECKPOINT, "world": {"topics": 40}}, "world.topics is 40",
     "model.source is 'huggingface' and config.data.source is 'preferences_jsonl'"),
    ({"preference": {"combine": "mean", "std_weight": 2.0}}, "preference.std_weight is 2.0",
     "preference.combine is 'mean'"),
    ({"data": {"train": "pairs.jsonl"}}, "data.train is 'pairs.jsonl'", "data.source is 'world'"),
    ({"data": {"max_bad_share": 0.1}}, "data.max_bad_share is 0.1", "data.source is 'world' and config.preference.human is ()"),
    ({"arithmetic": {"modulus": 7}}, "arithmetic.modulus is 7", "data.source is 'world'"),
    ({"reward": {"model_scale": 2.0}}, "reward.model_scale is 2.0", "reward.source is 'preference'"),
    ({"reward": {"retries": 5}}, "reward.retries is 5", "reward.source is 'preference'"),
    ({"feedback": {"reasoning": False, "clamp_low": 0.2}}, "feedback.clamp_low is 0.2", "feedback.reasoning is False"),
    ({"stages": ("sft", "online_dpo"), "dpo": {"margin": 1.0}}, "dpo.margin is 1.0", "dpo.objective is 'sigmoid'"),
    ({"stages": ("sft", "dpo"), "dpo": {"objective": "kto", "label_smoothing": 0.1}}, "dpo.label_smoothing is 0.1",
     "dpo.objective is 'kto'"),
])
def test_an_option_that_is_not_read_is_refused_with_the_standard_sentence(values, field, selector):
    with pytest.raises(UserError) as caught:
        from_config_dict(values)
    sentence = str(caught.value)
    assert sentence.startswith(f"config.{field}, which has no effect when config.{selector}: leave it at "), sentence
    assert f", or set config.{selector.split(' is ')[0]} " in sentence


@pytest.mark.parametrize("values", [
    {"ppo": {"gamma": 0.9, "lam": 0.5, "value_loss": "huber", "huber_delta": 2.0}},
    {"ppo": GROUPS | {"group_scale": "none"}},
    {"ppo": {"kl_controller": "adaptive", "kl_target": 1.0}},
    {"reward": {"source": "preference+callable", "callable": "mine.py:score", "retries": 5}},
    {"stages": ("sft", "dpo"), "dpo": {"objective": "sigmoid+bco_pair", "label_smoothing": 0.1}},
    {"model": CHECKPOINT | {"load_balance_coef": 0.1}, "world": {"topics": 40}},
    PAIRS | {"world": {"topics": 40, "tokens": 20_000}},
    {"preference": {"human": ("pairs.jsonl",)},
     "data": {"max_bad_share": 0.1, "limit": 9, "empty_answers": "keep", "differing_contexts": "keep"}},
])
def test_an_option_that_is_read_is_accepted(values):
    config = from_config_dict(values)
    for section, fields in values.items():
        if section != "stages":
            assert {name: getattr(getattr(config, section), name) for name in fields} == fields


@pytest.mark.parametrize("registry, section", [
    (ADVANTAGES, "ppo"), (POLICY_LOSSES, "ppo"), (OBJECTIVES, "dpo"), (REWARDS, "reward"), (DATA_SOURCES, "data"),
], ids=lambda value: value if isinstance(value, str) else value.kind)
def test_fields_that_a_record_reads_exist_and_declare_their_condition(registry, section):
    read_by = {entry.name: entry.metadata["read_by"] for entry in dataclasses.fields(getattr(Config(), section))}
    for record in registry:
        assert all(read_by[name] for name in record.reads or ())


def test_sources_read_fields_of_the_world_that_exist():
    names = {entry.name for entry in dataclasses.fields(Config().world)}
    assert all(names.issuperset(record.world or ()) for record in DATA_SOURCES)


def test_reset_unread_keeps_the_options_that_have_an_effect():
    values = default_config()
    values.model.update(source="huggingface", path="folder", layers=2, remat=True)
    values.world.update(tokens=20_000, topics=40)
    reset_unread(values, "model.source")
    assert (values.model.layers, values.world.tokens) == (Config().model.layers, Config().world.tokens)
    assert (values.model.remat, values.model.path, values.world.topics) == (True, "folder", 40)


def test_a_stage_that_is_not_run_is_not_checked():
    assert from_config_dict({"stages": ("pretrain", "sft"), "ppo": {"kl_target": 1.0}}).ppo.kl_target == 1.0


def test_every_selector_exists():
    def conditions(section, name):
        for entry in dataclasses.fields(section):
            value = getattr(section, entry.name)
            for condition in entry.metadata["read_by"]:
                yield from ((name, each) for each in (condition if isinstance(condition, tuple) else (condition,)))
            if dataclasses.is_dataclass(value):
                yield from conditions(value, f"{name}.{entry.name}" if name else entry.name)

    found = list(conditions(Config(), ""))
    assert len(found) > 60
    for name, condition in found:
        schema.get(Config(), condition.selector if "." in condition.selector else f"{name}.{condition.selector}")


@pytest.mark.parametrize("url", ["https://user:secret@api.example.com/v1", "https://api.example.com/v1?key=secret"])
def test_a_url_with_a_key_is_refused_without_showing_it(url):
    with pytest.raises(UserError, match="config.endpoint.url has a URL of api.example.com with a user") as error:
        from_config_dict({"feedback": {"judge": "endpoint"}, "endpoint": {"url": (url,)}})
    assert "secret" not in str(error.value)
