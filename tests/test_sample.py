"""`python -m jaxalign.sample`: every kind of folder, styles, files of prompts, a dialogue over a pipe, and mistakes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.config import Config, to_dict
from jaxalign.convert import main as convert
from jaxalign.data.chat.styles import encode_prompt
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.models.adapters.lora import merge
from jaxalign.models.checkpoints.export import export
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model
from jaxalign.records import Message
from jaxalign.registry.stages import STAGES
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.sample import main
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import write_json
from jaxalign.stages.shared.manifest import DONE, new_manifest
from jaxalign.steps.checkpoint import save_params
from jaxalign.storage import LocalStorage
from tests import made_tokenizers, tiny

_SIZES = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 20, "max_length": 96,
          "tie_embeddings": False}
_PROMPT = "the cat sat on a mat"


def _run(*arguments):
    return main(["sample", *map(str, arguments)])


def _random(model: Model, seed: int = 0):
    """Weights large enough that greedy answers do not repeat one token."""
    shapes = jax.tree.leaves_with_path(model.abstract())
    rng, tree = np.random.default_rng(seed), {}
    for path, leaf in shapes:
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part.key, {})
        node[path[-1].key] = jnp.asarray(rng.normal(0, 0.4, leaf.shape), jnp.float32)
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama in Hugging Face layout, with a ChatML template."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    texts = made_tokenizers.qwen(tmp_path_factory.mktemp("texts") / "tokenizer")
    tokenizer = load_tokenizer(texts)
    config = dataclasses.replace(Config().model, **_SIZES)
    model = run_models.make_model(dataclasses.replace(Config(), model=config), tokenizer.vocab_size)
    raw = config_json(model.config, _SIZES["max_length"]) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    export(folder, model, _random(model), config=raw, source=texts, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A LoRA run's folder: a base from scratch, and adapters as if PPO had trained them."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    config = Config()
    lora = dataclasses.replace(config.lora, rank=2, alpha=4.0)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **_SIZES), lora=lora)
    train_tokenizer(made_tokenizers.TEXTS, 150, workdir / "pretrain" / "tokenizer.model")
    model = run_models.make_model(config, 150)
    base, own = _random(model.base, 1), _random(model, 2)
    for name, params in {"pretrain": base, "ppo": own, "preference": own | {"score": np.ones(16, np.float32)}}.items():
        (workdir / name).mkdir(exist_ok=True)
        save_params(workdir / name / "params", params)
        manifest = new_manifest(STAGES.get(name).load("stage"), config, {})
        dataclasses.replace(manifest, status=DONE).write(LocalStorage(workdir))
    write_json(workdir / "config.json", to_dict(config))
    return workdir, model, base, own


def _answers(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parity
@pytest.mark.parametrize("style", ["plain", "chat"])
def test_greedy_answers_equal_those_of_transformers(folder, capsys, style):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if style == "plain":
        ids = tokenizer(_PROMPT, return_tensors="pt").input_ids
    else:
        dialogue = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _PROMPT}]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)[0, ids.shape[1] :]
    expected = tokenizer.decode(out, skip_special_tokens=True)
    system = ["--system=Be brief."] if style == "chat" else []
    given = [f"--model={folder}", f"--prompt={_PROMPT}", "--temperature=0", "--max_new_tokens=24", f"--style={style}", *system]
    assert _run(*given, "--json") == 0
    (found,) = _answers(capsys)
    assert len(set(out.tolist())) >= 3
    assert found["response"].strip(" ") == expected.strip(" ") and found["tokens"] == len(out)
    assert _run(*given) == 0
    assert capsys.readouterr().out == found["response"] + "\n"


@pytest.mark.slow
def test_a_mesh_of_eight_devices_and_orbax_change_nothing(folder, tmp_path, capsys):
    given = [f"--prompt={_PROMPT}", "--n=4", "--max_new_tokens=8", "--seed=5", "--json"]
    assert _run(f"--model={folder}", *given) == 0
    alone = _answers(capsys)
    assert len({answer["response"] for answer in alone}) == 4
    assert _run(f"--model={folder}", *given, "--mesh=2,2,2") == 0
    for here, there in zip(alone, _answers(capsys), strict=True):
        assert here.pop("logprob") == pytest.approx(there.pop("logprob"), abs=1e-3)
        assert here == there
    assert convert(["convert", f"--source={folder}", f"--target={tmp_path / 'orbax'}"]) == 0
    capsys.readouterr()
    assert _run(f"--model={tmp_path / 'orbax'}", *given) == 0
    assert [answer["response"] for answer in _answers(capsys)] == [answer["response"] for answer in alone]


@pytest.mark.slow
def test_a_stage_of_a_lora_run_answers_like_its_base_with_merged_adapters(workdir, capsys):
    folder, model, base, own = workdir
    tokenizer = load_tokenizer(folder / "pretrain" / "tokenizer.model")
    ids = encode_prompt(tokenizer, [Message("user", _PROMPT)], "compact")
    sampling = Sampling(16, tokenizer.stop_ids, 0.0)
    texts = []
    for stage, params in {"ppo": merge(model.lora, {**base, **own}), "pretrain": base}.items():
        response = tiny.respond(Engine(model.base, 1, 96), params, [ids], jax.random.key(0), sampling, [0])[0]
        texts.append(tokenizer.decode(response.ids))
        assert _run(f"--model={folder / stage}", f"--prompt={_PROMPT}", "--temperature=0", "--max_new_tokens=16") == 0
        assert capsys.readouterr().out == texts[-1] + "\n"
    assert texts[0] != texts[1]


def test_a_file_of_prompts_is_answered_row_by_row(folder, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat\n\na dog ran to the house\n")
    rows = [{"prompt": "the cat", "id": 7}, {"prompt": [{"role": "user", "content": "a dog ran to the house"}], "id": 8}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"--model={folder}", "--max_new_tokens=8", "--json", "--n=2"]
    assert _run(*given, f"--prompts={tmp_path / 'a.txt'}") == 0
    lines = _answers(capsys)
    assert [(line["prompt"], line["sample"]) for line in lines[1:3]] == [("the cat", 1), ("a dog ran to the house", 0)]
    assert _run(*given, f"--prompts={tmp_path / 'a.jsonl'}") == 0
    found = _answers(capsys)
    assert [line["id"] for line in found] == [7, 7, 8, 8] and found[2]["prompt"] == rows[1]["prompt"]
    assert [line["response"] for line in found] == [line["response"] for line in lines]
    assert _run(f"--model={folder}", "--max_new_tokens=8", "--n=2", f"--prompts={tmp_path / 'a.txt'}") == 0
    titles = [f"--- prompt {prompt}, answer {answer}\n" for prompt in (1, 2) for answer in (1, 2)]
    assert capsys.readouterr().out == "".join(f"{title}{line['response']}\n" for title, line in zip(titles, lines, strict=True))


def test_a_file_has_the_formats_and_layouts_of_training(folder, tmp_path, capsys):
    """A system message of the row is used, and --system precedes only the other rows. Each file has four rows, as in the test
    above: another number of rows is another program."""
    rule, asked = {"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat"}
    (tmp_path / "a.json").write_text(json.dumps([{"messages": [rule, asked, {"role": "assistant", "content": "sat"}], "id": 7},
                                                 "the cat", {"prompt": "\n\nHuman: the cat\n\nAssistant:"}, "the cat"]))
    (tmp_path / "a.csv").write_text("prompt,id\n" + '"the cat",8\n' * 4)
    given = [f"--model={folder}", "--max_new_tokens=8", "--temperature=0", "--json"]
    assert _run(*given, "--prompts=" + str(tmp_path / "a.json")) == 0
    with_rule, without, transcript, again = _answers(capsys)
    assert with_rule["prompt"] == [rule, asked] and with_rule["id"] == 7 and without["prompt"] == "the cat"
    assert with_rule["response"] != without["response"] == transcript["response"] == again["response"]
    assert _run(*given, "--prompts=" + str(tmp_path / "a.csv"), "--system=be kind") == 0
    assert [(named["id"], named["response"]) for named in _answers(capsys)] == [("8", with_rule["response"])] * 4
    assert _run(*given, "--prompts=" + str(tmp_path / "a.json"), "--system=a dog ran") == 0
    assert _answers(capsys)[0]["response"] == with_rule["response"]


@pytest.mark.medium
def test_a_system_message_that_the_style_cannot_write_affects_no_other(workdir, tmp_path, capsys):
    dialogue = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": dialogue}) + '\n"the cat"\n')
    assert _run(f"--model={workdir[0] / 'ppo'}", "--max_new_tokens=8", "--json", f"--prompts={tmp_path / 'a.jsonl'}") == 2
    refused, answered = _answers(capsys)
    assert "line 1, cannot be written in the style compact" in refused["error"] and answered["tokens"] > 0


@pytest.mark.process
def test_a_chat_over_a_pipe_keeps_its_turns_until_a_reset(folder, capsys):
    given = ["--temperature=0", "--max_new_tokens=24"]
    command = [sys.executable, "-m", "jaxalign.sample", f"--model={folder}", *given]
    said = "the cat\nwhy\n/reset\nthe cat\n/quit\nnever read\n"
    done = subprocess.run([*command, "--chat"], input=said, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert _run(f"--model={folder}", *given, "--prompt=the cat") == 0
    first = capsys.readouterr().out
    assert done.stdout.startswith(first) and done.stdout.endswith(first) and len(done.stdout) > 2 * len(first)
    assert done.stdout.count(first) == 2


def _chat(monkeypatch, capsys, said: str, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert _run(*arguments, "--chat") == 0
    return capsys.readouterr()


def test_a_long_chat_drops_its_oldest_turns(folder, monkeypatch, capsys):
    given = [f"--model={folder}", "--temperature=0", "--max_new_tokens=24"]
    long = _chat(monkeypatch, capsys, "the cat sat\na dog ran to the house\nthe cat sat on a mat\n", *given)
    assert "messages no longer fit and are dropped" in long.err
    huge = _chat(monkeypatch, capsys, "the cat " * 60 + "\nthe cat sat\n", *given)
    assert "this is too long for an answer to fit: a prompt may have 72 tokens" in huge.err
    assert long.out.startswith(huge.out)


def test_an_interrupted_chat_exits_with_130(folder, monkeypatch, capsys):
    class Interrupted(io.StringIO):
        def readline(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert _run(f"--model={folder}", "--chat") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_real_model_generates_its_published_text(real_data, capsys):
    stories = real_data / "stories260K"
    if not stories.is_dir():
        pytest.skip("the stories260K checkpoint is absent")
    golden = json.loads((stories / "golden_greedy.json").read_text())
    count = len(golden["greedy_ids"]) - len(golden["prompt_ids"])
    given = [f"--model={stories / 'hf'}", "--prompt=Once upon a time", "--temperature=0", f"--max_new_tokens={count}"]
    assert _run(*given) == 0
    assert "Once upon a time" + capsys.readouterr().out == golden["text"] + "\n"


def test_a_prompt_that_is_too_long_affects_no_other(folder, tmp_path, capsys):
    """The error is in its row with --json, and always at the end, with exit code 2."""
    (tmp_path / "long.txt").write_text("the cat " * 60 + "\nthe cat" * 3 + "\n")
    given = [f"--model={folder}", "--max_new_tokens=8"]
    assert _run(*given, "--json", f"--prompts={tmp_path / 'long.txt'}") == 2
    captured = capsys.readouterr()
    refused, *answered = (json.loads(line) for line in captured.out.splitlines())
    assert "long.txt, line 1, has" in refused["error"] and "response" not in refused
    assert len(answered) == 3 and all(row["response"] for row in answered)
    assert captured.err.count("\n") == 1 and "long.txt, line 1, has" in captured.err


def test_mistakes_are_reported_in_one_sentence(folder, workdir, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    (tmp_path / "empty.txt").write_text("\n")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"base_model_name_or_path": "NAME"}')
    model, prompt, run = f"--model={folder}", "--prompt=the cat", workdir[0]
    cases = [
        ([prompt], "--model is not given; it must be a folder"),
        ([model], "one of --prompt=TEXT, --prompts=FILE and --chat is expected"),
        ([model, prompt, "--chat"], "one of --prompt=TEXT, --prompts=FILE and --chat is expected"),
        ([model, "--chat", "--n=2"], "--n cannot be used with --chat"),
        ([f"--model={tmp_path / 'none'}", prompt], "none is not a folder; give the folder of a model"),
        ([f"--model={tmp_path}", prompt], "config.json does not exist"),
        ([f"--model={adapters}", prompt], f"{adapters} has only adapters (adapter_config.json) of the base model NAME; give"),
        ([f"--model={run / 'preference'}", prompt], "belongs to the stage preference, which does not train a language model"),
        ([model, prompt, "--style=compact"], "style is 'compact', but the tokenizer of "),
        ([f"--model={run / 'ppo'}", prompt, "--style=chat"], "has no chat template; set it to 'hh'"),
        ([model, prompt, "--style=plain", "--system=x"], "--system needs --style=chat or hh; the style is plain"),
        ([model, "--chat", "--style=plain"], "--chat needs a style with turns"),
        ([model, prompt, "--max_new_tokens=96"], "max_new_tokens is 96, but the model has only 96 positions"),
        ([model, prompt, "--top_p=2"], "flag --top_p=2"),
        ([model, prompt, "--mesh=2,2"], "--mesh is '2,2'; three numbers are expected"),
        ([model, prompt, "--mesh=1,5,1"], "mesh.fsdp is 5; it must divide the checkpoint's hidden size (16)"),
        ([model, f"--prompts={tmp_path / 'bad.jsonl'}"], 'bad.jsonl:1: "prompt" is of type int'),
        ([model, f"--prompts={tmp_path / 'empty.txt'}"], "empty.txt has no prompts; at least one is expected"),
        ([model, f"--prompts={tmp_path / 'no.txt'}"], "no.txt does not exist"),
        ([model, prompt, "more"], "'more' is not expected on the command line"),
    ]
    for arguments, message in cases:
        assert _run(*arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out, captured.err


@pytest.mark.process
def test_help_lists_the_flags_without_loading_jax():
    code = "import sys\nfrom jaxalign.sample import main\nassert main(['sample', '--help']) == 0 and main(['sample']) == 2\n"
    done = subprocess.run([sys.executable, "-c", code + "assert 'jax' not in sys.modules"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"--{flag}" in done.stdout for flag in ("model", "prompts", "chat", "top_p", "style", "compute_dtype"))
