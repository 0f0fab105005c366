"""The config: accepted and rejected values, error texts, and round trips."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

from jaxalign.config import Config, default_config, from_config_dict, schema, to_dict
from jaxalign.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]


def refusal(**values) -> str:
    with pytest.raises(UserError) as caught:
        from_config_dict(values)
    return str(caught.value)


def test_the_defaults_are_valid_and_survive_the_round_trip():
    assert from_config_dict(default_config()) == Config()
    assert from_config_dict(to_dict(Config())) == Config()


def test_a_config_file_changes_one_field_and_no_other():
    values = default_config()
    values.ppo.optimizer.learning_rate = 0.25
    changed = schema.flatten(from_config_dict(values))
    differing = {name for name, value in schema.flatten(Config()).items() if changed[name] != value}
    assert differing == {"ppo.optimizer.learning_rate"}
    assert changed["ppo.optimizer.learning_rate"] == 0.25


def test_the_optimizers_of_two_stages_are_independent():
    values = default_config()
    values.sft.optimizer.b1 = 0.5
    config = from_config_dict(values)
    assert config.sft.optimizer.b1 == 0.5
    assert config.ppo.optimizer.b1 == Config().ppo.optimizer.b1


def test_a_config_cannot_be_changed_after_reading():
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_config_dict({}).ppo.kl_coef = 1.0


@pytest.mark.parametrize("values, sentence", [
    ({"ppo": {"kl_coeff": 0.1}}, "config.ppo.kl_coeff is not a field of ppo; did you mean kl_coef?"),
    ({"sed": 1}, "config.sed is not a field of config; did you mean seed?"),
    ({"pretrian": {}}, "config.pretrian is not a field of config; did you mean pretrain?"),
    ({"sft": {"optimizer": {"learning_rat": 1.0}}},
     "config.sft.optimizer.learning_rat is not a field of optimizer; did you mean learning_rate?"),
    # Right name, wrong section: the error gives the full name, preferably from the same section.
    ({"ppo": {"learning_rate": 0.1}},
     "config.ppo.learning_rate is not a field of ppo; did you mean config.ppo.optimizer.learning_rate?"),
    ({"constitution": "x"}, "config.constitution is not a field of config; did you mean config.feedback.constitution?"),
    # A field of a nested section.
    ({"ppo": {"on_reference_kl": "stop"}},
     "config.ppo.on_reference_kl is not a field of ppo; did you mean config.ppo.checks.reference_kl?"),
    ({"mesh": {"zzz": 1}}, "config.mesh.zzz is not a field of mesh; its fields are data, fsdp, tensor, "
     "context, pipeline, pipeline_micro_batches, pipeline_repeats, slices, zero, keep_gathered, sequence_parallel, "
     "generation, offload"),
])
def test_the_error_of_an_unknown_key_names_the_nearest_field(values, sentence):
    assert refusal(**values) == sentence


@pytest.mark.parametrize("values, sentence", [
    ({"ppo": {"epochs": 0.5}}, "config.ppo.epochs is 0.5 (float); an int is expected"),
    ({"ppo": {"epochs": 4.0}}, "config.ppo.epochs is 4.0 (float); an int is expected"),
    ({"ppo": {"epochs": True}}, "config.ppo.epochs is True (bool); an int is expected"),
    ({"ppo": {"epochs": None}}, "config.ppo.epochs is None; an int is expected"),
    ({"ppo": {"gamma": "1"}}, "config.ppo.gamma is '1' (str); a float is expected"),
    ({"ppo": {"gamma": True}}, "config.ppo.gamma is True (bool); a float is expected"),
    ({"ppo": {"score_clip": "off"}}, "config.ppo.score_clip is 'off' (str); a float or None is expected"),
    ({"feedback": {"invert": 1}}, "config.feedback.invert is 1 (int); a bool is expected"),
    ({"model": {"path": 7}}, "config.model.path is 7 (int); a str is expected"),
    ({"stages": "ppo"}, "config.stages is 'ppo' (str); a tuple of str is expected"),
    ({"stages": ("sft", 3)}, "config.stages[1] is 3 (int); a str is expected"),
])
def test_the_error_of_a_wrong_type_names_field_value_and_type(values, sentence):
    assert refusal(**values) == sentence


@pytest.mark.parametrize("values, sentence", [
    ({"ppo": {"clip": 0.0}}, "config.ppo.clip is 0.0; it must be above 0"),
    ({"ppo": {"lam": 1.5}}, "config.ppo.lam is 1.5; it must be between 0.0 and 1.0"),
    ({"ppo": {"epochs": 0}}, "config.ppo.epochs is 0; it must be at least 1"),
    ({"ppo": {"kl_coef": float("nan")}}, "config.ppo.kl_coef is nan; a finite number is expected"),
    ({"ppo": {"kl_coef": float("inf")}}, "config.ppo.kl_coef is inf; a finite number is expected"),
    ({"ppo": {"optimizer": {"eps": 1e-300}}},
     "config.ppo.optimizer.eps is 1e-300, which float32 rounds to 0; 0 or a number of at least 1.2e-38 is expected"),
    ({"ppo": {"kl_coef": 1e39}}, "config.ppo.kl_coef is 1e+39; a number that float32 can represent is expected"),
    ({"mesh": {"zero": 4}}, "config.mesh.zero is 4; it must be one of 1, 2, 3"),
    ({"model": {"source": "hugging_face"}},
     "config.model.source is 'hugging_face'; it must be one of scratch, huggingface; did you mean huggingface?"),
])
def test_the_error_of_a_value_out_of_range_names_the_range(values, sentence):
    assert refusal(**values) == sentence


def test_stages_are_known_distinct_and_in_order():
    assert "did you mean sft?" in refusal(stages=("stf",))
    assert "in this order" in refusal(stages=("sft", "pretrain"))
    assert "in this order" in refusal(stages=("sft", "sft"))
    assert "config.stages is ()" in refusal(stages=())
    assert from_config_dict({"stages": ["pretrain", "sft"]}).stages == ("pretrain", "sft")


def test_pitfall_11_none_and_zero_are_distinct():
    assert from_config_dict({"ppo": {"value_clip": 0.0}}).ppo.value_clip == 0.0
    assert from_config_dict({"ppo": {"value_clip": None}}).ppo.value_clip is None
    assert from_config_dict({"ppo": {"kl_coef": 0}}).ppo.kl_coef == 0.0
    assert from_config_dict({"compile_cache": None}).compile_cache is None
    assert from_config_dict({"compile_cache": ""}).compile_cache == ""


def test_an_int_is_accepted_for_a_float_and_converted():
    value = from_config_dict({"ppo": {"gamma": 1}}).ppo.gamma
    assert value == 1.0 and type(value) is float


def test_all_batches_that_do_not_divide_are_named_at_once():
    """One line for each, so that a plan is not run once for each mistake."""
    values = {"stages": ("sft", "ppo"), "mesh": {"fsdp": 8}, "sft": {"batch_rows": 7}, "ppo": {"batch": 30}}
    with pytest.raises(UserError) as caught:
        from_config_dict(values)
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "config.sft.batch_rows is 7", "config.ppo.batch is 30"]


@pytest.mark.parametrize("values, words", [
    ({"mesh": {"data": 2, "fsdp": 2}, "sft": {"batch_rows": 6}},
     ["config.sft.batch_rows is 6", "config.mesh.data (2) x config.mesh.fsdp (2) = 4"]),
    ({"stages": ("ppo",), "ppo": {"batch": 10, "minibatches": 4}},
     ["config.ppo.batch is 10", "config.ppo.minibatches (4)"]),
    ({"stages": ("ppo",), "ppo": {"max_new_tokens": 40, "micro_batch_tokens": 40}},
     ["config.ppo.micro_batch_tokens is 40", "config.ppo.max_new_tokens (40)", "or set it to 0"]),
    ({"pretrain": {"batch_rows": 9, "micro_batches": 2}}, ["config.pretrain.batch_rows is 9", "(2)"]),
    ({"mesh": {"tensor": 4}, "model": {"heads": 4, "kv_heads": 2}},
     ["config.mesh.tensor is 4", "config.model.kv_heads (2)"]),
    ({"mesh": {"tensor": 2}, "model": {"mlp": 351}}, ["config.mesh.tensor is 2", "config.model.mlp (351)"]),
    ({"ppo": {"kl_controller": "adaptive", "kl_horizon": 20, "batch": 100}},
     ["config.ppo.kl_horizon is 20", "config.ppo.batch (100)"]),
    ({"mesh": {"tensor": 2}, "world": {"vocab_size": 769}},
     ["config.mesh.tensor is 2", "config.world.vocab_size (769)"]),
    ({"model": {"heads": 3, "kv_heads": 2}}, ["config.model.heads is 3", "config.model.kv_heads (2)"]),
    ({"model": {"head_dim": 31}}, ["config.model.head_dim is 31", "even"]),
    ({"model": {"source": "huggingface"}}, ["config.model.path is empty", "safetensors"]),
    ({"lora": {"path": "x"}}, ["config.lora.path is 'x' but config.model.source is 'scratch'", "leave lora.path empty"]),
    ({"lora": {"base": "int8"}}, ["config.lora.base is 'int8' but config.lora.rank is 0", "set rank above 0"]),
    ({"lora": {"path": "x", "rank": 4}, "model": {"source": "huggingface", "path": "y"}},
     ["config.lora.rank is 4 but config.lora.path is set", "leave rank at 0"]),
    ({"data": {"source": "preferences_jsonl"}}, ["config.data.train is empty", "JSONL"]),
    ({"data": {"style": "chat"}}, ["config.data.style is 'chat'", "config.model.source is 'scratch'"]),
    ({"world": {"topics": 20, "held_out_topics": 20}},
     ["config.world.held_out_topics is 20", "config.world.topics (20)"]),
    ({"stages": ("ppo",), "ppo": {"max_new_tokens": 64}, "model": {"max_length": 64}},
     ["config.ppo.max_new_tokens is 64", "config.model.max_length (64)"]),
    ({"preference": {"max_length": 512}, "model": {"max_length": 256}},
     ["config.preference.max_length is 512", "config.model.max_length (256)"]),
])
def test_the_error_of_incompatible_fields_names_both(values, words):
    sentence = refusal(**values)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


def test_only_the_stages_of_the_run_are_checked_against_the_mesh():
    assert "config.pretrain.batch_rows" in refusal(mesh={"data": 3}, pretrain={"batch_rows": 16})
    from_config_dict({"mesh": {"data": 3}, "stages": ("sft",), "sft": {"batch_rows": 9}})


def test_eight_devices_fit_the_defaults():
    mesh = from_config_dict({"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}).mesh
    assert (mesh.data, mesh.fsdp, mesh.tensor) == (2, 2, 2)


@pytest.mark.process
def test_every_field_is_documented_in_the_reference_and_the_page_is_current():
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "jaxalign.config"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout == page, "regenerate it: python -m jaxalign.config > docs/config.md"
    rows = re.findall(r"^\| `(\w+)` \| .+? \| .+ \| \S.* \|$", page, re.MULTILINE)
    assert len(rows) == len(schema.flatten(Config()))


@pytest.mark.process
def test_reading_a_config_does_not_load_jax():
    code = "import sys, jaxalign.config as c; c.from_config_dict(c.default_config()); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.medium
def test_pitfall_11_every_field_is_read_somewhere():
    """A text search by name: a field mentioned nowhere outside the schema would be accepted and have no effect."""
    config = ROOT / "jaxalign" / "config"
    sources = [path for path in (ROOT / "jaxalign").rglob("*.py") if config not in path.parents]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = {name.rsplit(".", 1)[-1] for name in schema.flatten(Config())}
    # A field of `checks` is looked up by the check's name, in words.
    forms = {name: rf'\.{name}\b|"{name}"|(?i:"{name.replace("_", " ")}")' for name in names}
    assert not {name for name, form in forms.items() if not re.search(form, text)}


# configs/cai/common.py has no config of its own.
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.py") if "def get_config(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_fits_the_schema(path, tmp_path):
    found = runpy.run_path(str(path))
    files = [tmp_path / name for name in found.get("FILES", {}).values()]  # A config that reads the files of a folder.
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    for variant in [(str(tmp_path),)] if files else [(), *((name,) for name in found.get("VARIANTS", ()))]:
        values = found["get_config"](*variant)
        if values.model.source == "huggingface":
            values.model.path = "folder"
            if not files:
                values.data["red_team" if values.data.source == "prompts_jsonl" else "train"] = "rows.jsonl"
        assert from_config_dict(values).stages[-1] == "report"


def test_steps_to_trace_must_be_of_a_training_stage_of_the_run():
    for spec in ("nosuch:1", "revise:1", "dpo:1"):
        assert refusal(profile=spec).startswith(f"config.profile is '{spec}', but only stages that train can be profiled; "
                                                 "in this run: pretrain, sft, ")
    assert "STAGE:STEP or STAGE:STEP:COUNT is expected" in refusal(profile="ppo:x")
    assert from_config_dict({"profile": "ppo:10:3"}).profile == "ppo:10:3"
