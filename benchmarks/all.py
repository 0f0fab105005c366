"""Run all speed benchmarks in sequence and print their results with the targets: `python benchmarks/all.py`.

    python benchmarks/all.py --tunix-python PYTHON --trl-python PYTHON --peers FOLDER \\
        --instructions instruction-data-with-preference.json --preferences pairs.jsonl.gz --tokenizer tokenizer.model \\
        [--only ppo_fixed_tunix sft_trl] [--list]

--peers is the folder with tunix_ppo.py and trl_ppo.py. Each benchmark runs in a separate process that writes NAME.json and
NAME.log (tables and progress) into --results; a failure does not stop the other benchmarks. Benchmarks that need a peer's
Python or a text file are skipped without it. --list prints the commands and runs nothing. Existing results are kept unless
--again is given, so that an interrupted run can continue. --sizes deep wide ... adds the benchmarks against peers at other
sizes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
NATURAL = ("--vocab", "64", "--new", "256")
SIZES = {
    "deep": ("--layers", "12", "--dim", "192", "--heads", "6", "--ffn", "512"),
    "wide": ("--layers", "3", "--dim", "512", "--heads", "8", "--ffn", "1376"),
    "vocab": ("--vocab", "16384"),
    "lengths": ("--prompt", "96", "--new", "128", "--batch", "32"),
}
"""Flags of each size: model, vocabulary, row lengths and numbers of rows."""


class Entry(NamedTuple):
    """A command; target: the maximum of its ratio (update_rate: the minimum), or None; field: path of the ratio in its JSON."""

    words: tuple[str, ...]
    target: float | None = None
    field: tuple[str, ...] = ("ratio",)
    at_least: bool = False


def entries(options: argparse.Namespace) -> dict[str, Entry]:
    pairs = ("--pairs", str(options.pairs))
    tunix, trl = (("--vs", name, "--peer-python", str(getattr(options, f"{name}_python"))) for name in ("tunix", "trl"))
    hf = ("--vs", "hf", *trl[2:])

    def script(name: str) -> tuple[str, ...]:
        return ("--peer-script", str(options.peers / f"{name}_ppo.py")) if options.peers else ()

    def text(data: Path | None) -> tuple[str, ...]:
        return ("--data", str(data), "--tokenizer", str(options.tokenizer))

    fixed = ("ppo_iteration.py", "--stop", "none", *pairs)
    natural = ("ppo_iteration.py", *NATURAL, *pairs)
    found = {
        "ppo_fixed_tunix": Entry((*fixed, *tunix, *script("tunix")), 0.80),
        "ppo_fixed_trl": Entry((*fixed, *trl, *script("trl")), 0.65),
        "ppo_natural_tunix": Entry((*natural, *tunix, *script("tunix")), 0.20),
        "ppo_natural_trl": Entry((*natural, *trl, *script("trl")), 0.30),
        "rollout_tunix": Entry(("rollout.py", *pairs, *tunix), 0.30),
        "rollout_hf": Entry(("rollout.py", *pairs, *hf), 0.30),
        "sft_trl": Entry(("sft.py", *pairs, *text(options.instructions), *trl), 0.85),
        "dpo_trl": Entry(("dpo.py", *pairs, *text(options.preferences), *trl), 0.50),
        "preference_trl": Entry(("preference.py", *pairs, *text(options.preferences), *trl)),
        "update_rate": Entry(("update_rate.py", *pairs), 0.60, at_least=True),
        "first_step": Entry(("first_step.py", *pairs), 0.35),
        "logprob_memory": Entry(("logprob_memory.py",), 0.125, ("compiled", "gradients", "ratio")),
        "advantages_scan": Entry(("advantages_scan.py",)),
        "ppo_fixed_parts": Entry((*fixed, "--parts")),
        "ppo_natural_parts": Entry((*natural, "--parts")),
    }
    against = {name: entry for name, entry in found.items() if "--vs" in entry.words}
    for size in options.sizes:
        fitting = {"vocab": ("dpo", "sft", "preference", "ppo_fixed"), "lengths": ("ppo", "rollout")}.get(size, ("",))
        found |= {
            f"{name}_{size}": entry._replace(words=(*entry.words, *SIZES[size]))
            for name, entry in against.items() if name.startswith(fitting)
        }
    return {name: entry for name, entry in found.items() if "None" not in entry.words}


def run(name: str, entry: Entry, results: Path) -> str:
    """Run one benchmark and return its status as a word."""
    command = [sys.executable, str(HERE / entry.words[0]), *entry.words[1:], "--out", str(results / f"{name}.json")]
    with open(results / f"{name}.log", "w", encoding="utf-8") as log:
        # The log shows no local paths.
        print("$ " + shlex.join(Path(word).name if "/" in word else word for word in command), file=log, flush=True)
        code = subprocess.run(command, stdout=log, stderr=log).returncode
    return "done" if code == 0 else f"failed, see {name}.log"


def summary(name: str, entry: Entry, results: Path) -> str:
    """Format one line of the table: ratio, target and whether the target is met."""
    try:
        value = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"| {name} | failed | | |"
    if entry.target is None:
        return f"| {name} | {value['ratio']:.3f} | | |" if "ratio" in value else f"| {name} | see its log | | |"
    for part in entry.field:
        value = value[part]
    holds = value >= entry.target if entry.at_least else value <= entry.target
    return f"| {name} | {value:.3f} | {'>=' if entry.at_least else '<='} {entry.target} | {'yes' if holds else 'no'} |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--tunix-python", "--trl-python", "--peers", "--instructions", "--preferences", "--tokenizer"):
        parser.add_argument(flag, type=lambda text: Path(text).absolute())
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--sizes", nargs="+", default=[], choices=SIZES, help="additional sizes: NAME_deep and so on")
    parser.add_argument("--only", nargs="+", help="names of the benchmarks to run")
    parser.add_argument("--again", action="store_true", help="repeat benchmarks that have results")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args(argv)
    chosen = {name: entry for name, entry in entries(options).items() if not options.only or name in options.only}
    if options.list:
        print("\n".join(f"{name}: {shlex.join(entry.words)}" for name, entry in chosen.items()))
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    for name, entry in chosen.items():
        if options.again or not (options.results / f"{name}.json").exists():
            print(f"{name}: {run(name, entry, options.results)}", file=sys.stderr, flush=True)
    print("\n".join(["| benchmark | ratio | target | met |", "|---|---|---|---|"]))
    print("\n".join(summary(name, entry, options.results) for name, entry in chosen.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
