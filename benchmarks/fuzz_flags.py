"""Command lines and config files for `fuzz_readers.py`: how they are made, and which code reads them."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

from benchmarks.fuzz_mutations import HOSTILE, mutate_bytes


def _hostile_text(chance: random.Random) -> str:
    value = chance.choice(HOSTILE)
    if isinstance(value, (list, dict)) or chance.random() < 0.2:
        value = chance.choice(
            (f"({value},)", str(value), "(", "()", "[1", "{'a': 1}", "9" * 5000, "(" * 300, "1,2,3", "@x", "#", "''")
        )
    return str(value)[:20000] if not isinstance(value, str) else value


def overrides(chance: random.Random, folder: Path, share: float) -> list[str]:
    from jaxalign.config import Config, schema

    names = list(schema.flatten(Config()))
    arguments = []
    for _ in range(chance.choice((1, 1, 2, 3)) if share else 0):
        name = chance.choice(names)
        if chance.random() < 0.1:
            name = mutate_bytes(chance, name.encode()).decode("utf-8", "surrogateescape")[:2000]
        arguments.append(f"--config.{name}={_hostile_text(chance)}")
    return arguments


def read_train(folder: Path, arguments: list[str]) -> None:
    from jaxalign import train
    from jaxalign.parallel import distributed

    _, rest = distributed.take_flags(arguments)
    train.read_arguments(["train", *rest])


_CONFIG = b"""from jaxalign.config import default_config

def get_config():
    config = default_config()
    config.ppo.kl_coef = 0.1
    config.ppo.batch = 64
    config.model.layers = 2
    config.stages = ("pretrain", "sft", "ppo")
    config.reward.source = "preference"
    return config
"""


def config_file(chance: random.Random, folder: Path, share: float) -> bytes:
    text = _CONFIG
    if share and chance.random() < 0.5:
        text = mutate_bytes(chance, text)
    elif share:
        line = chance.choice(
            (
                b"exit()",
                b"import sys; sys.exit('x')",
                b"raise SystemExit(0)",
                b"1 / 0",
                b"raise Exception('\\n' * 9 + 'y' * 100000)",
                b"config.ppo = 3",
                b"config.ppo.kl_coef = float('nan')",
                b"config.ppo.batch = 10 ** 400",
                b"config.model.layers = '\\ud800'",
                b"config = None",
                b"config.x = 1",
                b"def f(): f()\n    f()",
                b"config.stages = [1]",
                b"config.stages = 'a' * 100000",
                b"config.stages = None",
                b"config.ppo.batch = object()",
                b"config.ppo = {'a': [[]]}",
                b"raise GeneratorExit",
                b"import nothing",
                b"config.reward.source = ['x']",
                b"x = " + b"(" * 300 + b")" * 300,
                b"raise MemoryError",
            )
        )
        text = text.replace(b"    return", b"    " + line + b"\n    return")
    (folder / "config.py").write_bytes(text)
    return text


_COMMANDS = {
    "convert": ("source", "target", "dtype", "shard_gb", "mesh", "adapters"),
    "sample": (
        "model",
        "prompt",
        "prompts",
        "system",
        "temperature",
        "top_k",
        "top_p",
        "max_new_tokens",
        "n",
        "seed",
        "mesh",
        "style",
        "dtype",
        "compute_dtype",
        "batch",
    ),
    "world": ("export", "score", "seed", "tokens", "layers", "embed"),
    "plan": ("topology", "gpus", "prices", "mfu", "hbm", "network", "shape", "search", "compile"),
    "preview": ("stage", "limit", "tokenizer", "dialogues", "style", "ids", "length"),
    "judge_audit": ("stage", "limit", "out"),
    "train": ("workdir", "config", "overwrite", "process", "processes", "coordinator", "start_timeout", "devices"),
}


def flags(chance: random.Random, folder: Path, share: float) -> tuple[str, list[str]]:
    command = chance.choice(sorted(_COMMANDS))
    arguments = []
    for _ in range(chance.choice((1, 2, 3, 4)) if share else 0):
        name = chance.choice((*_COMMANDS[command], "coordinator", "process", "unknown"))
        value = chance.choice(
            (_hostile_text(chance), str(folder), str(folder / "none"), "H100x8", "v5e:4x4", "1,1,1", "0.5", "3")
        )
        arguments.append(chance.choice((f"--{name}={value}", f"--{name}", f"-{name}={value}", f"--no{name}", value)))
    return command, arguments


def read_flags(folder: Path, given: tuple[str, list[str]]) -> None:
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

            for name, read in (
                ("topology", lambda text: parse_topology(text, 1)),
                ("gpus", gpu_cluster),
                ("prices", read_prices),
            ):
                if own[name]:
                    read(own[name])
            module.read_config(["plan", *rest], own["shape"])
