"""The entry point `python -m jaxalign.init`: writes a first config for a model of the user's own, and checks the model.

Exit codes: 0 written, also with warnings, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130
interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from jaxalign import train
from jaxalign.commands import explain_writing, run_command
from jaxalign.errors import UserError, shown

if TYPE_CHECKING:  # At run time these modules import JAX, which a mistyped flag should not wait for.
    from jaxalign.starter.facts import ModelFacts
    from jaxalign.starter.settings import Choice

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
    try:
        folders = values(list(argv))[1:]
    except flags.Error as error:
        raise UserError(f"{shown(str(error))}; --help lists the flags") from None
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
    from jaxalign.starter.facts import read_facts

    files.check_new(folder)
    facts = read_facts(model)
    use_compile_cache("")
    with whole_folder(folder) as temporary:
        files.write_examples(temporary, facts)
        choice = _checked(facts, temporary, check)
        files.write_config(temporary, facts, choice, folder)
        _dry_run(temporary)
    config, place = shlex.quote(str(folder / files.CONFIG)), shlex.quote(str(folder / "run"))
    if choice.rehearsal or choice.keep:
        print(f"\nThe config is a REHEARSAL: its run shows every step, but its results mean nothing.\n"
              f"{_JUDGES.format(config=config)}")
    print(f"\n{folder} has {files.CONFIG}, {', '.join(files.PROMPTS)} and {files.CONSTITUTION}. Edit the prompts and the "
          f"constitution, then run\n    jaxalign train --config={config} --workdir={place}", flush=True)


def _checked(facts: ModelFacts, folder: Path, check: bool) -> Choice:
    """Prints a line for each check, and returns what they decide. folder: holds the prompts and the constitution."""
    from jaxalign.diagnosis.findings import Finding
    from jaxalign.starter.facts import KINDS
    from jaxalign.starter.settings import STORAGES, Choice, make_config, template_sets

    def say(topic: str, status: str, text: str) -> None:
        print(Finding(topic, status, text).line(), flush=True)

    say("model", "ok", f"{facts.family}, {facts.parameters:,} parameters, {facts.positions:,} positions, {KINDS[facts.kind]}")
    if facts.ends is not None:
        say("template", "ok", f"a question and its answer can be written; an answer ends with {facts.ends}")
    choice, fits = _fitting(facts, folder, Choice(template_sets(facts)[0], STORAGES[0]), say)
    if not check:
        say("judge", "note", "not checked; measure it with jaxalign judge-audit before you trust its labels")
    elif not fits:
        say("judge", "note", "not checked, because the weights may not fit into memory")
    else:
        choice = _asked(facts, folder, choice, say)
    make_config(facts, choice, folder)
    return choice


def _fitting(facts: ModelFacts, folder: Path, choice: Choice, say) -> tuple[Choice, bool]:
    """(the choice with the first storage that fits into memory, or the last one; whether it fits)."""
    from jaxalign.starter.memory import fit, this_device
    from jaxalign.starter.settings import STORAGES, make_config

    device = this_device()
    for storage in STORAGES:
        choice = dataclasses.replace(choice, storage=storage)
        found = fit(make_config(facts, choice, folder), device)
        if found.fits:
            say("memory", "ok", f"{found.sentence()}, with {storage.words}")
            return choice, True
    say("memory", "problem", f"{found.sentence()}, even with {storage.words}; take a smaller model, or a larger device "
        "(jaxalign plan tells which one suffices)")
    return choice, False


def _asked(facts: ModelFacts, folder: Path, choice: Choice, say) -> Choice:
    """The choice after the model has judged pairs and revised answers."""
    from jaxalign.starter.facts import BASE
    from jaxalign.starter.judging import best, check_judge
    from jaxalign.starter.settings import make_config, template_sets
    from jaxalign.starter.trial import try_revisions

    judged = []
    for templates in template_sets(facts):
        judged.append(check_judge(make_config(facts, choice, folder), templates))
        if judged[-1].able:
            break
    judge = best(judged)
    choice = dataclasses.replace(choice, templates=judge.templates, rehearsal=not judge.able)
    if judge.able:
        say("judge", "ok", judge.sentence())
    else:
        advice = ("a base model seldom judges: use its instruction-tuned version, as the model or as the judge" if
                  facts.kind == BASE else "use a larger model of the same family, or another judge")
        say("judge", "problem", f"this model cannot judge: {'; '.join(judge.faults())} ({judge.sentence()}); {advice}")
    trial = try_revisions(make_config(facts, choice, folder))
    if trial.enough:
        say("revisions", "ok", trial.sentence())
    else:
        say("revisions", "problem", f"{trial.sentence()}; {trial.remedy()}")
    print("\n".join(["Read this revision: the run trains on such texts.", *trial.example()]), flush=True)
    return dataclasses.replace(choice, keep=trial.keep)


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
