"""The entry point `python -m jaxalign.init`: writes a first config for a model of the user's own, and checks the model.

Exit codes: 0 written, also with warnings, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130
interrupted.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxalign import train
from jaxalign.commands import explain_writing, parse_flags, run_command
from jaxalign.errors import UserError

_USAGE = """usage: python -m jaxalign.init DIR --model=FOLDER [--nocheck]

Writes a short config, example prompts and a constitution to a new folder DIR, with settings that suit the model in FOLDER, and
prints the command that aligns the model with itself as the judge (docs/cai_your_model.md). Before that, it checks the model:
family, tokenizer, chat template, memory on this machine, 20 judgements, and the revisions of 8 answers.

  --model=FOLDER  a language model in Hugging Face format, or a finished stage of a run
  --nocheck       do not load the weights: leave out the judgements and the revisions

Exit codes: 0 written, also if a warning says that the model cannot judge; 2 a mistake in the arguments or in the folder.
"""
_JUDGES = """To have another judge, set JUDGE in {config}:
  the URL of a server with a larger model   JUDGE = "http://localhost:8000/v1"
  the folder of a larger model              JUDGE = "FOLDER"
and measure it with: jaxalign judge-audit --config={config}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the folder and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _run, explain_writing)


def read_arguments(argv: Sequence[str]) -> tuple[Path, str, bool]:
    """(DIR, the model's folder, whether to load the weights). `argv` includes the program's name.

    Raises:
      UserError: an argument is not a flag, or DIR or --model is missing.
    """
    values = flags.FlagValues()
    flags.DEFINE_string("model", "", "The model's folder.", flag_values=values)
    flags.DEFINE_bool("check", True, "Whether to load the weights.", flag_values=values)
    folders = parse_flags(values, argv, named_only=False)
    if len(folders) != 1:
        raise UserError(f"{len(folders)} folders are given; one is expected, the new folder for the config, as in "
                        "jaxalign init DIR --model=FOLDER")
    if not values.model:
        raise UserError("--model is missing; set it to the folder of your model, as in jaxalign init DIR --model=FOLDER")
    return Path(folders[0]).expanduser(), values.model, values.check


def _run(argv: list[str]) -> None:
    folder, model, check = read_arguments(argv)
    # Imported here so that a mistyped flag is reported without importing JAX.
    from jaxalign.models.checkpoints.export import whole_folder
    from jaxalign.parallel.compile_cache import use_compile_cache
    from jaxalign.starter import files
    from jaxalign.starter.checks import choose
    from jaxalign.starter.facts import read_facts

    files.check_new(folder)
    facts = read_facts(model)
    use_compile_cache("")
    with whole_folder(folder) as temporary:
        files.write_examples(temporary, facts)
        choice = choose(facts, temporary, check, lambda finding: print(finding.line(), flush=True))
        files.write_config(temporary, facts, choice, folder)
        _dry_run(temporary)
    config, place = shlex.quote(str(folder / files.CONFIG)), shlex.quote(str(folder / "run"))
    if choice.rehearsal or choice.keep:
        print(f"\nThe config is a REHEARSAL: its run shows every step, but its results mean nothing.\n"
              f"{_JUDGES.format(config=config)}")
    print(f"\n{folder} has {files.CONFIG}, {', '.join(files.PROMPTS)} and {files.CONSTITUTION}. Edit the prompts and the "
          f"constitution, then run\n    jaxalign train --config={config} --workdir={place}", flush=True)


def _dry_run(folder: Path) -> None:
    """Checks the written config as `jaxalign train --dry-run` does.

    Raises:
      UserError: the run would be refused.
    """
    from jaxalign import pipeline

    config, workdir, _ = train.read_arguments(["init", f"--config={folder / 'config.py'}", f"--workdir={folder / 'run'}"])
    with contextlib.redirect_stdout(io.StringIO()):
        pipeline.dry_run(config, workdir)


if __name__ == "__main__":
    sys.exit(main())
