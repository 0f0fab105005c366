"""Run a variant of configs/real_size.py on the devices at hand and compare its memory and time with the plan.

    python benchmarks/real_run.py --variant llama32_1b --shape Llama-3.2-1B [--iterations 4] [--plan h100:1x1]

A model folder of the published shape with random weights is written first, with a small tokenizer and preferences of random
words. Then `python -m jaxalign.train` runs the stages of the variant, as a user would run them, with few steps, and
`python -m jaxalign.plan` plans the same config. Memory is the peak that the device reports up to the end of each stage; the
device cannot reset it, so a stage that needs less than an earlier one shows the earlier peak. Seconds and tokens of a phase are
totals over the steps after the first, which compiles; those of stage evaluate, which has no steps, include compilation. MFU is
the share of the device's peak FLOP rate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import at_least, progress, random_params, report, run_main

from jaxalign.data.tokenizers import chatml
from jaxalign.errors import UserError
from jaxalign.models.checkpoints.export import export
from jaxalign.models.checkpoints.huggingface import parse_config
from jaxalign.models.model import Model
from jaxalign.planner.shapes import published_shapes

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/real_size.py"
WORDS = 3000
"""The number of different words in the prompts and answers."""
PROMPT_WORDS, ANSWER_WORDS = 60, 50


def write_model(folder: Path, fields: dict[str, Any], texts: Sequence[str]) -> None:
    """Write a folder in Hugging Face format: the shape of `fields`, random bfloat16 weights, a tokenizer trained on texts."""
    model = Model(parse_config(folder, fields).decoder)
    export(folder, model, random_params(model, 0), config=fields, files=chatml.train_files(texts, WORDS), dtype="bfloat16")


def write_preferences(path: Path, rows: int) -> list[str]:
    """Write rows of chosen and rejected dialogues in random words, and return their texts."""
    rng = random.Random(0)
    syllables = ["ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(WORDS)]

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    entries = []
    for _ in range(rows):
        opening = f"\n\nHuman: {text(PROMPT_WORDS)}\n\nAssistant: "
        entries.append({name: opening + text(ANSWER_WORDS) for name in ("chosen", "rejected")})
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return [entry[name] for entry in entries for name in entry]


def train_flags(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the flags of `jaxalign.train` and `jaxalign.plan` for the variant with few steps."""
    given = {
        "model.path": folder / "model", "data.train": folder / "preferences.jsonl", "ppo.iterations": options.iterations,
        "evaluate.prompts": options.evaluated, "compile_cache": options.cache or folder / "cache",
        "tracking.system_seconds": 0.5,
    }
    return [
        f"--config={CONFIG}:{options.variant}", *(f"--config.{name}={value}" for name, value in given.items()),
        *(f"--config.{setting}" for setting in options.set),
    ]


def run(words: Sequence[str], codes: Sequence[int] = (0,), platform: str | None = None) -> tuple[float, str]:
    """Run Python, whose stderr is that of this process, and return (seconds, stdout).

    codes: the exit codes of success. platform: the value of JAX_PLATFORMS, if not that of this process.
    """
    began = time.perf_counter()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": path} | ({"JAX_PLATFORMS": platform} if platform else {}))
    seconds = time.perf_counter() - began
    name = " ".join(words[:2])
    progress(f"{name}: {seconds:.1f} s")
    if done.returncode not in codes:
        raise UserError(f"{name} ended with code {done.returncode}: {done.stdout[-3000:]}")
    return seconds, done.stdout


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def phases(workdir: Path, stage: str) -> dict[str, dict[str, float]]:
    """Return seconds, tokens and FLOPs of a stage's phases, summed, and the MFU where the device's peak is known."""
    found: dict[str, dict[str, float]] = {}
    for row in lines_of(workdir / stage / "timing.jsonl"):
        total = found.setdefault(row["phase"], dict.fromkeys(("seconds", "tokens", "flops", "peak"), 0.0))
        for name in ("seconds", "tokens", "flops"):
            total[name] += row[name]
        total["peak"] = row["peak"]
    for total in found.values():
        peak = total.pop("peak")
        total["mfu"] = total["flops"] / total["seconds"] / peak if peak and total["seconds"] else 0.0
    return found


def peaks(workdir: Path) -> dict[str, int]:
    """Return the largest peak that the device reported during each stage, in bytes; empty without device memory (a CPU)."""
    found: dict[str, int] = {}
    for row in lines_of(workdir / "system.jsonl"):
        if "device_memory_peak" in row:
            found[row["stage"]] = max(found.get(row["stage"], 0), row["device_memory_peak"])
    return found


def planned(tasks: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the bytes, seconds of a call, number of calls, and rows of each task of a plan, by "stage phase"."""
    names = ("peak_bytes", "seconds", "calls", "rows", "length", "new_tokens")
    return {f"{task['stage']} {task['phase']}": {name: task[name] for name in names} for task in tasks}


def table(stages: Sequence[str], result: dict[str, Any]) -> list[str]:
    """Format the phases with their times and the peaks of the stages, beside the plan's."""
    lines = ["| stage | phase | seconds | tokens | tokens/s | MFU |", "|---|---|---|---|---|---|"]
    for stage in stages:
        for phase, total in result["phases"][stage].items():
            rate = total["tokens"] / total["seconds"] if total["seconds"] else 0.0
            lines.append(f"| {stage} | {phase} | {total['seconds']:.2f} | {total['tokens']:.0f} | {rate:.0f} | "
                         f"{total['mfu']:.1%} |")
    lines += ["", "| stage | peak so far, GB | plan, GB |", "|---|---|---|"]
    highest = 0.0
    for stage in stages:
        tasks = [task["peak_bytes"] for name, task in result["plan"].items() if name.startswith(f"{stage} ")]
        highest = max([highest, *tasks])
        reported = result["peaks"].get(stage)
        lines.append(f"| {stage} | {'-' if reported is None else f'{reported / 1e9:.2f}'} | {highest / 1e9:.2f} |")
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="llama32_1b", help="of configs/real_size.py")
    parser.add_argument("--shape", default="Llama-3.2-1B", choices=list(published_shapes()))
    parser.add_argument("--fields", type=json.loads, default={}, help="JSON: fields of config.json that replace the shape's")
    parser.add_argument("--plan", default="h100:1x1", metavar="TOPOLOGY", help="topology of the plan")
    parser.add_argument("--compile", action="store_true", help="also compile the plan's programs for the topology")
    parser.add_argument("--iterations", type=at_least(1), default=4, help="of PPO")
    parser.add_argument("--evaluated", type=at_least(1), default=32, help="prompts of stage evaluate")
    parser.add_argument("--rows", type=at_least(32), default=192, help="preferences")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the config")
    parser.add_argument("--cache", type=Path, help="folder of compiled programs; default: an empty one")
    parser.add_argument("--write", type=Path, help="write model and preferences to this folder, and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args(argv)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        texts = write_preferences(options.write / "preferences.jsonl", options.rows)
        write_model(options.write / "model", published_shapes()[options.shape] | options.fields, texts)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # This process must not use the device: JAX would reserve most of its memory.
        run([__file__, *argv, "--write", name], platform="cpu")
        flags, workdir = train_flags(options, folder), folder / "run"
        compiles = ["--compile"] if options.compile else []
        # Exit code 1 says that the run does not fit, which the measurement may contradict.
        words = ["-m", "jaxalign.plan", *flags, f"--topology={options.plan}", "--prompt=512", "--json", *compiles]
        _, text = run(words, codes=(0, 1))
        plan = json.loads(text)
        seconds, _ = run(["-m", "jaxalign.train", *flags, f"--workdir={workdir}"])
        config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        stages = [stage for stage in config["stages"] if stage != "report"]
        result = {
            "seconds": seconds, "phases": {stage: phases(workdir, stage) for stage in stages},
            "peaks": peaks(workdir), "checks": json.loads((workdir / "ppo" / "checks.json").read_text(encoding="utf-8")),
            "plan": planned(plan["tasks"]), "compiled": plan["compiled"],
        }
    return report(options, "real_run", result, table(stages, result))


if __name__ == "__main__":
    run_main(main)
