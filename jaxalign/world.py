"""The entry point `python -m jaxalign.world`: exports the embedded world as a chat model, or scores answers in it.

`stages/shared/world_export.py` exports, `data/world/scores.py` scores. Exit codes: 0 done, 2 a mistake that the user can
correct (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxalign.commands import explain_writing, parse_flags, run_command
from jaxalign.errors import UserError

_USAGE = """usage: python -m jaxalign.world --export=DIR [--seed=SEED] [--tokens=N] [--steps=N] [--prompts=N]
                                [--judge_steps=N]
       python -m jaxalign.world --score=ROWS [--seed=SEED]

  --export=DIR  trains a small chat model of the embedded world and writes it, with prompts and constitutions, to a new
                folder, which configs/own_model.py aligns
  --score=ROWS  judges answers by the rules of the world and prints a table: a .jsonl file, a folder with rows-*.jsonl such
                as runs/x/evaluate, or a pattern in quotes (docs/data_formats.md)
  --seed=SEED   the world's seed; default 0. Scores need the seed of the export
  --tokens=N    approximate size of the training text, counted in words and punctuation marks; default {tokens:,}
  --steps=N     training steps; default {steps:,}
  --prompts=N   maximum number of prompts in a file; default {prompts:,}
  --judge_steps=N  with N > 0, also trains a second judge for N steps on its own text: DIR/judge and DIR/judge_rubrics.json
                (docs/labels.md); 1500 suffice; default {judge_steps:,}
"""
_DEFAULTS = {"tokens": 2_800_000, "steps": 1600, "prompts": 4096, "judge_steps": 0}
_EXPORTS = tuple(_DEFAULTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Exports or scores, and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE.format(**_DEFAULTS), _export_or_score, explain_writing)


def _export_or_score(argv: list[str]) -> None:
    values = _read_arguments(argv)
    if values.score:
        from jaxalign.data.world import scores
        from jaxalign.data.world.chat_text import chat_world

        print(scores.table(scores.score(chat_world(values.seed), scores.read_rows(values.score))))
    else:
        print(_export(values))


def _export(values: flags.FlagValues) -> str:
    from jaxalign.stages.shared.world_export import ExportSettings, export_world

    folder = Path(values.export).expanduser()
    given = {name: values[name].value if values[name].present else _DEFAULTS[name] for name in _EXPORTS}
    done = export_world(folder, ExportSettings(seed=values.seed, **given))
    trained = "; ".join(f"the {name} is trained on {of['tokens']:,} tokens, held-out loss {of['held_out_loss']:.3f}"
                        for name, of in done.items())
    judge = (f" \\\n        --config.evaluate.rubrics={folder}/judge_rubrics.json --config.judge.evaluate=model "
             f"--config.judge.path={folder}/judge" if "judge" in done else "")
    return (f"{folder} has the model, its prompts and its constitutions ({trained}); align it with\n"
            f"    python -m jaxalign.train --config=configs/own_model.py:{folder} --workdir=runs/own_model{judge}\n"
            f"and score the answers with\n"
            f"    python -m jaxalign.world --score=runs/own_model/evaluate --seed={values.seed}")


def _read_arguments(argv: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("export", None, "The new folder.", flag_values=values)
    flags.DEFINE_string("score", None, "The answers to judge.", flag_values=values)
    flags.DEFINE_integer("seed", 0, "The seed.", lower_bound=0, upper_bound=2**31 - 1, flag_values=values)
    for name in _EXPORTS:
        least = 0 if name == "judge_steps" else 1
        flags.DEFINE_integer(name, None, "See the usage.", lower_bound=least, flag_values=values)
    parse_flags(values, argv)
    if bool(values.export) == bool(values.score):
        raise UserError("exactly one of --export=DIR and --score=ROWS must be given; --help lists the flags")
    other = next((name for name in _EXPORTS if values.score and values[name].present), None)
    if other is not None:
        raise UserError(f"--{other} is given with --score, which does not read it; omit it")
    return values


if __name__ == "__main__":
    sys.exit(main())
