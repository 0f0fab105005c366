"""`python -m jaxalign.convert`: both directions, stages of a run, and one sentence for every mistake."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxalign.config import Config, to_dict
from jaxalign.convert import main
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.models.checkpoints.huggingface import load_params, read_config
from jaxalign.models.model import Model
from jaxalign.registry.stages import STAGES
from jaxalign.rewards.scorer import student_model
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import write_json
from jaxalign.stages.shared.manifest import DONE, new_manifest
from jaxalign.steps.checkpoint import save_params
from jaxalign.storage import LocalStorage

_SIZES = {"layers": 2, "embed": 24, "heads": 6, "kv_heads": 2, "head_dim": 8, "mlp": 28, "max_length": 64, "vocab_multiple": 8}
_STUDENT = {"layers": 1, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 20}
_VOCAB = 130


def _run(*arguments):
    return main(["convert", *arguments])


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run folder with the tokenizer and the weights of four stages, as if they had been trained."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    config = Config()
    sections = {"model": dataclasses.replace(config.model, **_SIZES)}
    sections["reward_distill"] = dataclasses.replace(config.reward_distill, **_STUDENT)
    config = dataclasses.replace(config, **sections)
    train_tokenizer(["the cat sat on the mat", "a dog ran to the house"] * 20, _VOCAB, workdir / "pretrain" / "tokenizer.model")
    policy = run_models.make_model(config, _VOCAB)
    models = {"pretrain": policy, "ppo": policy, "preference": policy.with_head("scalar")}
    models["reward_distill"] = student_model(config.reward_distill, policy)
    for number, (name, model) in enumerate(models.items()):
        folder = workdir / name
        folder.mkdir(exist_ok=True)
        save_params(folder / "params", model.init(jax.random.key(number)))
        manifest = new_manifest(STAGES.get(name).load("stage"), config, {})
        dataclasses.replace(manifest, status=DONE).write(LocalStorage(workdir))
        write_json(folder / "summary.json", {"shift": 0.25, "scale": 1.5})
    # A later run changed fields after these stages had run.
    write_json(workdir / "config.json", to_dict(dataclasses.replace(config, model=dataclasses.replace(config.model, layers=9))))
    return workdir, models


@pytest.mark.parity
def test_transformers_loads_a_policy_of_a_run_with_its_tokenizer(workdir, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, models = workdir
    assert _run(f"--source={folder / 'ppo'}", f"--target={tmp_path / 'hf'}", "--mesh=1,2,2") == 0
    assert "ppo (LlamaForCausalLM) is now in Hugging Face format" in capsys.readouterr().out
    model, params = models["ppo"], models["ppo"].init(jax.random.key(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = load_tokenizer(folder / "pretrain" / "tokenizer.model")
    ids = tokenizer.encode("the dog sat on a house")
    assert ids == [ours.bos_id, *ours.encode("the dog sat on a house")]
    expected = theirs(torch.tensor([ids])).logits.detach().numpy()
    actual = model.logits(params, model.hidden(params, jnp.asarray([ids])))
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id, theirs.config.pad_token_id) == (1, 2, 0)
    assert theirs.generation_config.eos_token_id == 2


@pytest.mark.parity
@pytest.mark.parametrize("stage", ["preference", "reward_distill"])
def test_exporting_a_reward_model_of_a_run_prints_how_its_raw_score_was_used(workdir, tmp_path, capsys, stage):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, models = workdir
    assert _run(f"--source={folder / stage}", f"--target={tmp_path / 'hf'}") == 0
    assert "its score is raw; the reward of this run was (score - shift) / scale with shift = 0.25 and scale = 1.5" in (
        capsys.readouterr().out
    )
    model = models[stage]
    params = model.init(jax.random.key(list(models).index(stage)))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ids = [[1, 20, 21, 22, 2], [1, 7, 7, 2, 0]]  # The second is padded; its score is read at its own last token.
    expected = theirs(torch.tensor(ids)).logits.detach().numpy()[:, 0]
    scores = model.scores(params, model.hidden(params, jnp.asarray(ids)))[np.arange(2), np.array([4, 3])]
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_a_member_of_an_ensemble_is_exported_separately(workdir, tmp_path, capsys):
    folder, models = workdir
    stage = tmp_path / "tiny" / "preference"
    (stage / "member-1").mkdir(parents=True)
    for name in ("config.json", "preference/manifest.json"):
        (tmp_path / "tiny" / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tiny" / "pretrain").symlink_to(folder / "pretrain")
    save_params(stage / "member-1" / "params", models["preference"].init(jax.random.key(7)))
    members = [{"shift": 0.0, "scale": 1.0}, {"shift": 0.5, "scale": 2.0}]
    write_json(stage / "summary.json", {"shift": 9.0, "scale": 9.0, "members": members, "combine": "min"})
    assert _run(f"--source={stage / 'member-1'}", f"--target={tmp_path / 'hf'}") == 0
    said = capsys.readouterr().out
    assert "one member of 2; this run normalised it to (score - shift) / scale with shift = 0.5 and scale = 2, and" in said
    assert "combined all members by min" in said
    loaded = load_params(tmp_path / "hf", Model(read_config(tmp_path / "hf").decoder, "scalar"))
    np.testing.assert_array_equal(loaded["score"], models["preference"].init(jax.random.key(7))["score"])


@pytest.mark.medium
def test_the_round_trip_through_orbax_changes_nothing(workdir, tmp_path, capsys):
    folder, _ = workdir
    assert _run(f"--source={folder / 'ppo'}", f"--target={tmp_path / 'a'}", "--dtype=bfloat16") == 0
    assert _run(f"--source={tmp_path / 'a'}", f"--target={tmp_path / 'orbax'}", "--mesh=2,2,2") == 0
    assert f"{tmp_path / 'a'} (LlamaForCausalLM) is now in Orbax format" in capsys.readouterr().out
    assert _run(f"--source={tmp_path / 'orbax'}", f"--target={tmp_path / 'b'}", "--shard_gb=0.00001") == 0
    first = load_file(tmp_path / "a" / "model.safetensors")
    again = {}
    for file in (tmp_path / "b").glob("model-*.safetensors"):
        again |= load_file(file)
    assert first.keys() == again.keys()
    for name, value in first.items():
        assert value.dtype == again[name].dtype
        np.testing.assert_array_equal(value, again[name])
    for name in ("config.json", "generation_config.json", "tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    params = load_params(tmp_path / "b", Model(read_config(tmp_path / "b").decoder))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}


def test_mistakes_are_reported_in_one_sentence_and_leave_nothing(workdir, tmp_path, capsys):
    folder, _ = workdir
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "params").mkdir()
    source, fresh = f"--source={folder / 'ppo'}", f"--target={tmp_path / 'x'}"
    cases = [
        ([f"--source={tmp_path / 'none'}", fresh], "none is not a folder; give the folder of a model, or of a stage"),
        ([f"--source={tmp_path / 'used'}", fresh], "config.json does not exist"),
        ([f"--source={tmp_path / 'half'}", fresh], "contains params, but neither a model's config.json nor"),
        ([source, f"--target={tmp_path / 'used'}"], "used already exists; give the name of a new folder"),
        ([source], "--target is not given"),
        ([source, fresh, "--dtype=int8"], "value should be one of <float32|bfloat16|float16>"),
        ([source, fresh, "--mesh=2,2"], "--mesh is '2,2'; three numbers are expected"),
        ([source, fresh, "--mesh=1,5,1"], "mesh.fsdp is 5; it must divide the checkpoint's hidden size (24)"),
        ([source, fresh, "more"], "'more' is not expected on the command line"),
    ]
    for arguments, message in cases:
        assert _run(*arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "used"]


def test_a_half_done_stage_is_refused(workdir, tmp_path, capsys):
    folder, _ = workdir
    manifest = json.loads((folder / "ppo" / "manifest.json").read_text())
    stage = tmp_path / "tiny" / "ppo"
    (stage / "params").mkdir(parents=True)
    write_json(stage / "manifest.json", manifest | {"status": "running"})
    assert _run(f"--source={stage}", f"--target={tmp_path / 'x'}") == 2
    assert "stage ppo is unfinished in" in capsys.readouterr().err
    (stage / "params").rmdir()  # It has not written weights yet.
    assert _run(f"--source={stage}", f"--target={tmp_path / 'x'}") == 2
    assert "stage ppo is unfinished in" in capsys.readouterr().err
    write_json(stage / "manifest.json", manifest | {"stage": "evaluate"})
    write_json(stage.parent / "config.json", json.loads((folder / "config.json").read_text()))
    assert _run(f"--source={stage}", f"--target={tmp_path / 'x'}") == 2
    assert "belongs to the stage evaluate, which does not train a language model" in capsys.readouterr().err


def test_help_lists_the_flags(capsys):
    assert _run("--help") == 0
    assert all(flag in capsys.readouterr().out for flag in ("--source",)) and _run("--wrong=1") == 2
    assert "--help lists the flags" in capsys.readouterr().err


def test_a_line_break_in_a_flag_is_escaped_in_the_message(capsys):
    assert main(["convert", "--dtype=\n"]) == 2
    assert capsys.readouterr().err.startswith(r"flag --dtype=\n: value should be one of")
