"""The kinds of input of `fuzz.py`: how valid files are made, how they are mutated, and which code of the package reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import socket
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks.fuzz_mutations import HOSTILE, mutate_bytes, mutate_json, mutate_jsonl

REPOSITORY = Path(__file__).resolve().parents[1]
_TEXTS = ["the cat sat on the mat. Why did it sit there?", "A dog ran to the house, and barked!\n\nThen it slept."] * 8
_CHAT = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "Air scatters light."}]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        prepare: writes the valid files to a folder.
        mutate: changes files in a copy of that folder, or makes arguments; -> what `read` needs, and what a finding shows.
            With the last argument, the share of inputs to change, 0, the files stay valid.
        read: gives the result to the package; raises what the package raises.
    """

    prepare: Callable[[Path], None]
    mutate: Callable[[random.Random, Path, float], Any]
    read: Callable[[Path, Any], Any]


def _files(mutations: dict[str, Callable[[random.Random, bytes], bytes]]):
    """Changes one of the folder's files that match a pattern of `mutations`."""

    def mutate(chance: random.Random, folder: Path, share: float) -> tuple[str, bytes]:
        pattern = chance.choice(sorted(mutations))
        path = chance.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
        if share:
            path.write_bytes(mutations[pattern](chance, path.read_bytes()))
        return str(path.relative_to(folder)), path.read_bytes()[:2000]

    return mutate


# Flags and configs.

_ALPHABET = ("--config.", "--config", "=", "--", "-", "--workdir=", "--process=", "--processes=", "--coordinator=", ":", "é", "\x00")


def _hostile_text(chance: random.Random) -> str:
    value = chance.choice(HOSTILE)
    if isinstance(value, (list, dict)) or chance.random() < 0.2:
        value = chance.choice((f"({value},)", str(value), "(", "()", "[1", "{'a': 1}", "9" * 5000, "(" * 300, "1,2,3", "@x", "#", "''"))
    return str(value)[:20000] if not isinstance(value, str) else value


def _overrides(chance: random.Random, folder: Path, share: float) -> list[str]:
    from jaxalign.config import Config, schema

    names = list(schema.flatten(Config()))
    arguments = []
    for _ in range(chance.choice((1, 1, 2, 3)) if share else 0):
        name = chance.choice(names)
        if chance.random() < 0.1:
            name = mutate_bytes(chance, name.encode()).decode("utf-8", "surrogateescape")[:2000]
        arguments.append(f"--config.{name}={_hostile_text(chance)}")
    return arguments


def _read_train(folder: Path, arguments: list[str]) -> None:
    from jaxalign import train
    from jaxalign.parallel import distributed

    _, rest = distributed.take_flags(arguments)
    train.read_arguments(["train", *rest])


_CONFIG = b'''from jaxalign.config import default_config

def get_config():
    config = default_config()
    config.ppo.kl_coef = 0.1
    config.ppo.batch = 64
    config.model.layers = 2
    config.stages = ("pretrain", "sft", "ppo")
    config.reward.source = "preference"
    return config
'''


def _config_file(chance: random.Random, folder: Path, share: float) -> bytes:
    text = _CONFIG
    if share and chance.random() < 0.5:
        text = mutate_bytes(chance, text)
    elif share:
        line = chance.choice((b"exit()", b"import sys; sys.exit('x')", b"raise SystemExit(0)", b"1 / 0",
                              b"raise Exception('\\n' * 9 + 'y' * 100000)", b"config.ppo = 3", b"config.ppo.kl_coef = float('nan')",
                              b"config.ppo.batch = 10 ** 400", b"config.model.layers = '\\ud800'", b"config = None", b"config.x = 1",
                              b"def f(): f()\n    f()", b"config.stages = [1]", b"config.stages = 'a' * 100000", b"config.stages = None",
                              b"config.ppo.batch = object()", b"config.ppo = {'a': [[]]}", b"raise GeneratorExit", b"import nothing",
                              b"config.reward.source = ['x']", b"x = " + b"(" * 300 + b")" * 300, b"raise MemoryError"))
        text = text.replace(b"    return", b"    " + line + b"\n    return")
    (folder / "config.py").write_bytes(text)
    return text


_COMMANDS = {
    "convert": ("source", "target", "dtype", "shard_gb", "mesh", "adapters"),
    "sample": ("model", "prompt", "prompts", "system", "temperature", "top_k", "top_p", "max_new_tokens", "n", "seed", "mesh", "style",
               "dtype", "compute_dtype", "batch"),
    "world": ("export", "score", "seed", "tokens", "layers", "embed"),
    "plan": ("topology", "gpus", "prices", "mfu", "hbm", "network", "shape", "search", "compile"),
    "preview": ("stage", "limit", "tokenizer", "dialogues", "style", "ids", "length"),
    "judge_audit": ("stage", "limit", "out"),
    "train": ("workdir", "config", "overwrite", "process", "processes", "coordinator", "start_timeout", "devices"),
}


def _flags(chance: random.Random, folder: Path, share: float) -> tuple[str, list[str]]:
    command = chance.choice(sorted(_COMMANDS))
    arguments = []
    for _ in range(chance.choice((1, 2, 3, 4)) if share else 0):
        name = chance.choice((*_COMMANDS[command], "coordinator", "process", "unknown"))
        value = chance.choice((_hostile_text(chance), str(folder), str(folder / "none"), "H100x8", "v5e:4x4", "1,1,1", "0.5", "3"))
        arguments.append(chance.choice((f"--{name}={value}", f"--{name}", f"-{name}={value}", f"--no{name}", value)))
    return command, arguments


def _read_flags(folder: Path, given: tuple[str, list[str]]) -> None:
    import importlib

    command, arguments = given
    module = importlib.import_module(f"jaxalign.{command}")
    from jaxalign.parallel import distributed

    _, rest = distributed.take_flags(arguments)
    if command == "train":
        module.read_arguments(["train", *rest])
    elif command in ("convert", "sample", "world"):
        module._read_arguments([command, *rest])
    else:
        own, rest = module._take_own(arguments)
        if command == "plan":
            from jaxalign.planner.hardware import gpu_cluster
            from jaxalign.planner.prices import read_prices
            from jaxalign.planner.topology import parse_topology

            for name, read in (("topology", lambda text: parse_topology(text, 1)), ("gpus", gpu_cluster), ("prices", read_prices)):
                if own[name]:
                    read(own[name])
            module.read_config(["plan", *rest], own["shape"])


# Data files.


def _write_rows(folder: Path, **files: list[dict[str, Any]]) -> None:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _prepare_data(folder: Path) -> None:
    _write_rows(
        folder,
        prompts=[{"prompt": "Why?", "answer": 4}, {"messages": _CHAT[:1], "answer": 5}, {"prompt": _CHAT[:1], "answer": 1}],
        preferences=[
            {"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No.", "margin": 1.0},
            {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "margin": 0.5},
            {"chosen": _CHAT, "rejected": [_CHAT[0], {"role": "assistant", "content": "No."}]},
        ],
        judgements=[{"prompt": "Why?", "completion": "So.", "label": True}, {"prompt": _CHAT[:1], "completion": "No.", "label": False}],
        messages=[{"messages": _CHAT}, {"prompt": "Why?", "response": "So."}, {"messages": _CHAT * 2}],
    )
    (folder / "prompts.json").write_text(json.dumps([{"prompt": "Why?"}, {"prompt": "How?"}]))
    (folder / "prompts.csv").write_text('prompt,messages,answer\nWhy?,,4\nHow?,"[{""role"": ""user"", ""content"": ""x""}]",5\n')
    (folder / "prompts.txt").write_text("Why?\nHow?\n")


def _read_data(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.data.sources.asked import read_asked
    from jaxalign.data.sources.judgements import read_judgements
    from jaxalign.data.sources.jsonl import read_jsonl
    from jaxalign.data.sources.preferences import read_preferences
    from jaxalign.data.sources.prompts import read_prompts
    from jaxalign.preview import read_dialogues
    from jaxalign.trainers.rows import as_examples, as_judgements, as_pairs, as_prompts

    name = given[0]
    file, stem = folder / name, name.partition(".")[0]
    readers = {
        "prompts": (lambda: read_prompts(file, 0.5), lambda: read_asked(file)),
        "preferences": (lambda: read_preferences(file, max_bad_share=0.5, margins=True),
                        lambda: read_preferences(file, max_bad_share=0.0, gold=True)),
        "judgements": (lambda: read_judgements(file, max_bad_share=0.5),),
        "messages": (lambda: read_dialogues(file),),
    }[stem]
    in_memory = {"prompts": as_prompts, "preferences": as_pairs, "judgements": as_judgements, "messages": as_examples}[stem]
    _all(*readers, *([lambda: in_memory([row.value for row in read_jsonl(file, 1.0)[0]], "data")] if name.endswith("l") else []))


def _all(*readers: Callable[[], Any]) -> None:
    """Calls every reader, and then raises the last UserError."""
    from jaxalign.errors import UserError

    last = None
    for read in readers:
        try:
            read()
        except UserError as error:
            last = error
    if last is not None:
        raise last


def _prepare_constitutions(folder: Path) -> None:
    own = (resources.files("jaxalign.feedback") / "constitutions" / "courtesy.json").read_bytes()
    (folder / "own.json").write_bytes(own)
    paper = {"harmful0": {"prompt": ["x CritiqueRequest: y Critique:"], "edit_request": "RevisionRequest: z Revision:"}}
    public = {"constitutions": [{"critic": "a", "revision": "b"}],
              "system_chat": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 3}
    (folder / "paper.json").write_text(json.dumps(paper))
    (folder / "public.json").write_text(json.dumps(public))


def _read_constitution(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.feedback.constitution import Constitution

    Constitution(folder / given[0])


# Models and tokenizers.


def _prepare_model(folder: Path) -> None:
    import jax

    from jaxalign.data.tokenizers import chatml, sentence_piece
    from jaxalign.data.tokenizers.load import load_tokenizer
    from jaxalign.models.architecture import DecoderConfig
    from jaxalign.models.checkpoints.export import export
    from jaxalign.models.families.llama import config_json
    from jaxalign.models.model import Model

    source = folder.with_name("tokenizer-files")
    source.mkdir()
    for name, content in chatml.train_files(_TEXTS, 300).items():
        (source / name).write_text(content)
    tokenizer = load_tokenizer(source)
    model = Model(DecoderConfig(tokenizer.vocab_size, 2, 16, 4, 2, 4, 20))
    raw = config_json(model.config, 128) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    whole = folder / "model"
    export(whole, model, model.init(jax.random.key(0)), config=raw, source=source)
    config = json.loads((whole / "config.json").read_text()) | {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64}, "attention_bias": False, "bos_token_id": 1}
    (whole / "config.json").write_text(json.dumps(config))
    (whole / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "additional_special_tokens": []}))
    (whole / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_id], "bos_token_id": None}))
    shards = shutil.copytree(whole, folder / "sharded")
    (shards / "model.safetensors").rename(shards / "model-1.safetensors")
    from safetensors import safe_open

    with safe_open(shards / "model-1.safetensors", framework="numpy") as file:
        index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model-1.safetensors")}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    other = shutil.copytree(whole, folder / "sentencepiece", ignore=shutil.ignore_patterns("tokenizer*", "*.safetensors"))
    size = sentence_piece.train_tokenizer(_TEXTS, 150, other / "tokenizer.model").vocab_size
    added = {str(size): {"content": "<|im_end|>", "special": True}}
    settings = json.loads((source / "tokenizer_config.json").read_text()) | {"eos_token": "</s>", "pad_token": None,
                                                                         "added_tokens_decoder": added}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    families = folder / "families"
    for model_type, fields in {
        "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True, "layer_norm_eps": 1e-5},
        "qwen3": {"use_sliding_window": False}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0}, "mistral": {"sliding_window": 64},
    }.items():
        (families / model_type).mkdir(parents=True)
        plain = {name: value for name, value in raw.items() if name not in ("architectures", "rope_scaling")}
        plain |= {"model_type": model_type, **fields}
        if model_type.startswith(("gemma", "gpt")):
            plain["hidden_act"] = "gelu"
        (families / model_type / "config.json").write_text(json.dumps(plain))


def _read_model(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.models.checkpoints import huggingface
    from jaxalign.models.language_model import load_model

    source = (folder / given[0]).parent
    config = huggingface.read_config(source)
    if source.parent.name == "families" or not any(source.glob("*.safetensors")):
        config.decoder.frequencies()
    else:
        load_model(source, max_length=16)


def _read_tokenizer(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.data.chat.styles import encode_completion, encode_prompt
    from jaxalign.data.tokenizers.load import load_tokenizer
    from jaxalign.records import Message

    tokenizer = load_tokenizer((folder / given[0]).parent)
    ids = tokenizer.encode("the cat sat é <|im_end|> \ufffd\n")
    tokenizer.decode(ids)
    for token in (*ids[:20], tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size - 1, tokenizer.vocab_size + 5):
        tokenizer.piece(token)
    messages = [Message("user", "Why?"), Message("assistant", "So."), Message("user", "How?")]
    encode_prompt(tokenizer, messages, "hh")
    if tokenizer.files.chat_template is not None:
        encode_prompt(tokenizer, messages, "chat")
        encode_completion(tokenizer, messages, "So.", "chat")


def _change_template(chance: random.Random, content: bytes) -> bytes:
    settings = json.loads(content)
    template = settings["chat_template"]
    settings["chat_template"] = mutate_bytes(chance, template.encode()).decode("utf-8", "surrogateescape")
    return json.dumps(settings).encode()


# Work directories.


def _prepare_run(folder: Path) -> None:
    from jaxalign import pipeline
    from jaxalign.config import from_config_dict

    pipeline.run(from_config_dict({
        "compile_cache": None, "stages": ("pretrain", "report"), "world": {"tokens": 10_000, "topics": 12, "held_out_topics": 4,
                                                                           "vocab_size": 400},
        "model": {"layers": 1, "embed": 16, "mlp": 32, "heads": 2, "kv_heads": 2, "head_dim": 8, "max_length": 192},
        "pretrain": {"steps": 4, "batch_rows": 2, "row_length": 64, "checkpoint_every": 2},
    }), folder / "run")


def _read_run(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign import pipeline
    from jaxalign.config.finished import finished_stage, language_model_stage
    from jaxalign.stages.shared.manifest import find_manifest
    from jaxalign.storage import LocalStorage
    from jaxalign.tracking.report.page import render_report

    run = folder / "run"
    config = _run_config(folder)
    _all(lambda: finished_stage(run / "pretrain"), lambda: language_model_stage(run / "pretrain"), lambda: render_report(run),
         lambda: find_manifest(LocalStorage(run), "pretrain"), lambda: pipeline.find_changes(config, run))


def _run_config(folder: Path):
    """The config of the unchanged run."""
    from jaxalign.config import finished

    return finished.finished_stage(folder.with_name("run-files") / "run" / "pretrain").config


def _read_weights(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.config.finished import language_model_stage
    from jaxalign.models.checkpoints.run_folder import stage_policy
    from jaxalign.parallel.mesh import make_mesh
    from jaxalign.parallel.sharding import Sharding
    from jaxalign.steps.checkpoint import Checkpointer

    if "/checkpoints/" in given[0]:
        with contextlib.closing(Checkpointer(folder / "run/pretrain/checkpoints")) as checkpointer:
            checkpointer.restore({})
    else:
        stage_policy(language_model_stage(folder / "run/pretrain"), Sharding(make_mesh()))


# Messages of other programs.

_HELLO = b'{"word": "jaxalign", "process": 1, "processes": 3}\n'


def _roll_call(chance: random.Random, folder: Path, share: float) -> bytes:
    return mutate_json(chance, _HELLO) + chance.choice((b"\n", b"")) if share else _HELLO


def _read_roll_call(folder: Path, message: bytes) -> None:
    from jaxalign.parallel.roll_call import call

    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"

    def stranger() -> None:
        for _ in range(50):
            with contextlib.suppress(OSError), socket.create_connection(("localhost", int(address.rpartition(":")[2])), 1) as caller:
                caller.sendall(message)
                caller.shutdown(socket.SHUT_WR)
                caller.settimeout(0.5)
                caller.recv(1)
                return

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        call(address, 3, 0, 0.1)
    finally:
        thread.join()


_REPLY = {"id": "x", "model": "m", "choices": [{"message": {"role": "assistant", "content": "A"}, "finish_reason": "stop", "logprobs": {
    "content": [{"token": "A", "logprob": -0.1, "bytes": [65], "top_logprobs": [{"token": "B", "logprob": -2.0, "bytes": [66]}]}]}}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
_COMPLETION = {"choices": [{"text": "A", "logprobs": {"tokens": ["A"], "token_logprobs": [-0.1], "top_logprobs": [{"B": -2.0}]}}]}
_ERROR = {"error": {"message": "too many", "type": "rate_limit", "code": 429, "innererror": {"code": "x"}}}


def _wire(chance: random.Random, folder: Path, share: float) -> tuple[int, bytes]:
    status, value = chance.choice(((200, _REPLY), (200, _COMPLETION), (400, _ERROR), (429, _ERROR), (500, _ERROR)))
    content = json.dumps(value).encode()
    return status, mutate_json(chance, content) if share else content


def _read_wire(folder: Path, given: tuple[int, bytes]) -> None:
    from jaxalign.endpoint import exchange, failures, records, transport

    status, body = given
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = None
    target = failures.Target("http://localhost:1/v1", "m", "KEY", False)
    for path in (records.CHAT, "/completions"):
        call = exchange.Call(path, {}, lambda raw, path=path: records.read_reply(path, raw), lambda reply, text, target: reply)
        exchange._interpret(transport.HTTPResponse(status, {}, text), call, target)


KINDS = {
    "overrides": Kind(lambda folder: None, _overrides, _read_train),
    "config_file": Kind(lambda folder: None, _config_file,
                        lambda folder, text: _read_train(folder, [f"--config={folder / 'config.py'}"])),
    "flags": Kind(lambda folder: None, _flags, _read_flags),
    "data": Kind(_prepare_data, _files({"*.jsonl": mutate_jsonl, "prompts.json": mutate_json, "prompts.csv": mutate_bytes,
                                        "prompts.txt": mutate_bytes}), _read_data),
    "constitution": Kind(_prepare_constitutions, _files({"*.json": mutate_json}), _read_constitution),
    "model": Kind(_prepare_model, _files({"*/config.json": mutate_json, "families/*/config.json": mutate_json,
                                          "*/*.index.json": mutate_json, "*/*.safetensors": mutate_bytes}), _read_model),
    "tokenizer": Kind(_prepare_model, _files({"*/tokenizer*.json": mutate_json, "*/tokenizer.model": mutate_bytes,
                                              "*/*tokens*.json": mutate_json, "*/generation_config.json": mutate_json}),
                      _read_tokenizer),
    "template": Kind(_prepare_model, _files({"*/tokenizer_config.json": _change_template}), _read_tokenizer),
    "run": Kind(_prepare_run, _files({"run/*.json": mutate_json, "run/*/*.json": mutate_json, "run/*/*.jsonl": mutate_jsonl}),
                _read_run),
    "weights": Kind(_prepare_run, _files({"run/*/params/**/*": mutate_bytes, "run/*/checkpoints/**/*": mutate_bytes}), _read_weights),
    "roll_call": Kind(lambda folder: None, _roll_call, _read_roll_call),
    "wire": Kind(lambda folder: None, _wire, _read_wire),
}
PLACES = {"model": "model-files", "tokenizer": "model-files", "template": "model-files", "run": "run-files", "weights": "run-files"}
"""The folder of valid files of a kind, if it is shared with other kinds."""
