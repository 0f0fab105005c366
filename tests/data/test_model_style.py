"""The style that a run's model determines, and the styles that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jaxalign import pipeline
from jaxalign.config import RewardConfig, from_config_dict, to_dict
from jaxalign.data.chat.model_style import check_data, resolve_auto
from jaxalign.data.chat.styles import choose_style, encode_prompt
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message
from jaxalign.rewards import outside
from jaxalign.stages.shared.base import Stage
from tests import made_tokenizers


def config(path, style: str = "auto", stages=("sft",)):
    data = {"source": "preferences_jsonl", "train": "pairs.jsonl", "style": style}
    return from_config_dict({
        "stages": stages, "compile_cache": None, "data": data, "model": {"source": "huggingface", "path": str(path)}})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tokenizers with and without a chat template."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {"chat": made_tokenizers.qwen(root / "chat"), "base": made_tokenizers.qwen(root / "base", None)}


@pytest.mark.parametrize(("folder", "style"), [("chat", "chat"), ("base", "hh")])
def test_a_pretrained_model_determines_the_style(folders, folder, style):
    assert resolve_auto(config(folders[folder])).data.style == style
    assert resolve_auto(config(folders[folder], "hh")).data.style == "hh"


def test_a_model_from_scratch_uses_the_compact_markers():
    assert resolve_auto(from_config_dict({})).data.style == "compact"
    assert resolve_auto(from_config_dict({"stages": ("pretrain",), "data": {"style": "hh"}})).data.style == "hh"


@pytest.mark.parametrize(("folder", "style", "message"), [
    ("base", "chat", "config.data.style is 'chat', but .* has no chat template; set it to 'hh'"),
    ("chat", "compact", "config.data.style is 'compact', but the tokenizer of .* no symbol '<user>'.*'chat' .*'hh'"),
])
def test_a_style_that_the_model_cannot_write_is_refused(folders, tmp_path, folder, style, message):
    with pytest.raises(UserError, match=message) as error:
        pipeline.run(config(folders[folder], style), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run" / "config.json").exists()


class Reader(Stage):
    """A stage that reads the data section and does nothing."""

    name, config_fields = "sft", ("data", "model")

    def run(self, context):
        (context.directory / "style").write_text(context.config.data.style)


def test_stages_manifests_and_config_json_have_the_resolved_style(folders, tmp_path):
    stage = Reader()
    for _ in range(2):  # The second run finds the stage done.
        pipeline.run(config(folders["chat"]), tmp_path, load=lambda name: stage)
    assert (tmp_path / "sft" / "style").read_text() == "chat"
    for name in ("config.json", "sft/manifest.json"):
        found = json.loads((tmp_path / name).read_text())
        assert (found["data"] if name == "config.json" else found["config"]["data"])["style"] == "chat"
    assert pipeline.find_changes(config(folders["chat"], "chat"), tmp_path, load=lambda name: stage) == {}
    changed = pipeline.find_changes(config(folders["chat"], "hh"), tmp_path, load=lambda name: stage)
    assert changed == {"sft": ["config.data.style was 'chat' and is 'hh'"]}


def test_a_finished_run_is_recognised_without_its_model(tmp_path):
    folder, stage = made_tokenizers.qwen(tmp_path / "model"), Reader()
    pipeline.run(config(folder), tmp_path / "run", load=lambda name: stage)
    folder.rename(tmp_path / "moved")
    assert pipeline.find_changes(config(folder), tmp_path / "run", load=lambda name: stage) == {}


def test_manifests_of_older_runs_count_as_unchanged(tmp_path):
    """They have the style "compact", which was the default, or no style."""
    made, stage = from_config_dict({"stages": ("sft",), "compile_cache": None}), Reader()
    pipeline.run(made, tmp_path, load=lambda name: stage)
    path = tmp_path / "sft" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["config"]["data"].pop("style") == "compact"
    path.write_text(json.dumps(manifest))
    assert pipeline.find_changes(made, tmp_path, load=lambda name: stage) == {}


def test_a_missing_model_gives_the_error_of_the_stage_that_reads_it(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    values = to_dict(config(tmp_path / "none")) | {"data": {
        "source": "preferences_jsonl", "train": str(tmp_path / "pairs.jsonl")}}
    with pytest.raises(UserError, match=r"config.model.path: .*none/config.json cannot be read"):
        pipeline.run(from_config_dict(values), tmp_path / "run")


@pytest.mark.process
def test_the_style_is_resolved_without_jax():
    code = ("import sys; from jaxalign.config import from_config_dict; from jaxalign.data.chat import model_style; "
            "model_style.resolve_auto(from_config_dict({})); assert 'jax' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_base_model_can_use_the_plain_style(folders):
    assert resolve_auto(config(folders["base"], "plain")).data.style == "plain"
    with pytest.raises(UserError, match="config.data.style is 'plain', which is for pretrained models"):
        from_config_dict({"data": {"style": "plain"}})


def test_the_plain_style_leaves_out_dialogues_of_several_turns(folders):
    tokenizer = load_tokenizer(folders["base"])
    turns = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert tokenizer.decode(encode_prompt(tokenizer, turns[:1], "plain")) == "a"
    with pytest.raises(DialogueRefused, match="continues a single text"):
        encode_prompt(tokenizer, turns, "plain")


def test_a_converted_model_from_scratch_is_sampled_in_the_style_of_its_run(folders, tmp_path):
    train_tokenizer(made_tokenizers.TEXTS, 150, tmp_path / "tokenizer.model")
    assert choose_style(load_tokenizer(tmp_path), None) == "compact"
    assert choose_style(load_tokenizer(folders["base"]), None) == "plain"
    assert choose_style(load_tokenizer(folders["chat"]), None) == "chat"


def test_a_style_has_one_check_with_one_wording(folders):
    """A run, `load_model` and jaxalign.sample, and an external reward model differ only in the name of the setting."""
    tokenizer = load_tokenizer(folders["base"])
    for style in ("compact", "chat"):
        found = set()
        for name, call in (
            ("config.data.style", lambda style=style: resolve_auto(config(folders["base"], style))),
            ("style", lambda style=style: choose_style(tokenizer, style)),
            ("config.reward.model_style", lambda style=style: outside._style(RewardConfig(model_style=style), tokenizer)),
        ):
            with pytest.raises(UserError) as error:
                call()
            assert str(error.value).startswith(f"{name} is {style!r}, but ")
            found.add(str(error.value).removeprefix(name))
        assert len(found) == 1


@pytest.mark.parametrize(("values", "message"), [
    ({}, "config.stages has pretrain, which trains a base from scratch, but .* set config.stages to revise,sft,compare"),
    ({"stages": ("revise", "sft")}, "config.data.source is 'world', its default, so revise, sft would use the toy prompts .* "
                                    "set config.data.source to 'prompts_jsonl' .* or config.world.with_own_model to True"),
    ({"stages": ("ppo",), "reward": {"source": "callable", "callable": "m:f"}}, "so ppo would use the toy prompts"),
])
def test_a_pretrained_model_is_not_trained_on_the_toy_world_unless_asked(folders, tmp_path, values, message):
    made = {"compile_cache": None, "model": {"source": "huggingface", "path": str(folders["chat"])}} | values
    with pytest.raises(UserError, match=message) as error:
        pipeline.run(from_config_dict(made), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run" / "config.json").exists()
    if values:
        check_data(from_config_dict(made | {"world": {"with_own_model": True}}))


def test_a_tokenizer_with_the_markers_may_use_the_world(folders, tmp_path):
    folder = made_tokenizers.qwen(tmp_path / "model")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<critique_request>"))
    check_data(from_config_dict({"stages": ("revise",), "model": {"source": "huggingface", "path": str(folder)}}))


def test_the_toy_world_is_asked_for_only_where_that_has_an_effect():
    with pytest.raises(UserError, match="config.world.with_own_model is True, which has no effect when config.model.source"):
        from_config_dict({"world": {"with_own_model": True}})
