"""The entry point `python -m jaxalign.ratings`: blind sheets of answers for people to rate, and the import of their ratings.

Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxalign.commands import run_command
from jaxalign.errors import UserError

_USAGE = """usage: python -m jaxalign.ratings export WORKDIR --out=FOLDER [--pairs=N] [--seed=S] [--models=EARLIER,LATER]
       python -m jaxalign.ratings import WORKDIR --key=FILE --ratings=FILE [--rater=NAME]

export writes pairs of answers of two models to the same prompts, in random order and without the models' names: sheet.html, a
page on which a person rates them, the same pairs as sheet.csv and sheet.jsonl, and key.json, which the raters must not see.
import checks a filled sheet, stores its ratings in WORKDIR/ratings and adds them to the report (docs/ratings.md).

  --out=FOLDER          export: the folder of the sheet and its key
  --pairs=N             export: the number of pairs; default 100, or all pairs of different answers if there are fewer
  --seed=S              export: determines the pairs and their order; default 0
  --models=A,B          export: two models of stage evaluate; default the first and the last
  --key=FILE            import: the key.json of the sheet
  --ratings=FILE        import: the file that the page saved, or the filled sheet.csv or sheet.jsonl
  --rater=NAME          import: the name of the person; default the name entered on the page
"""

_FLAGS = {"export": {"out": "", "pairs": "100", "seed": "0", "models": ""}, "import": {"key": "", "ratings": "", "rater": ""}}
_REQUIRED = {"export": ("out",), "import": ("key", "ratings")}


def main(argv: Sequence[str] | None = None) -> int:
    """Exports or imports, and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _run)


def _run(argv: list[str]) -> None:
    action, workdir, options = _read(argv[1:])
    {"export": _export, "import": _import}[action](workdir, options)


def _export(workdir: Path, options: dict[str, str]) -> None:
    # Imported here so that a mistake in the arguments is reported at once.
    from jaxalign.tracking.ratings.sheet import answers_of, draw_sheet, two_models, write_sheet
    from jaxalign.tracking.workdir import read_run

    run = read_run(workdir)
    models = two_models(run, options["models"].split(",") if options["models"] else ())
    sheet = draw_sheet(answers_of(run), models, int(options["pairs"]), int(options["seed"]))
    *sheets, key = write_sheet(sheet, Path(options["out"]).expanduser())
    print(f"The sheet has {len(sheet.pairs):,} pairs of answers of {models[0]} and {models[1]}. They gave different answers to "
          f"{sheet.prompts - sheet.equal:,} of {sheet.prompts:,} prompts.")
    print(f"For the raters, one of: {', '.join(map(str, sheets))}\nKeep from the raters: {key}")


def _import(workdir: Path, options: dict[str, str]) -> None:
    from jaxalign.tracking.ratings.sheet import answers_of
    from jaxalign.tracking.ratings.stored import import_ratings
    from jaxalign.tracking.report.page import render_report
    from jaxalign.tracking.report.ratings import rates_sentence
    from jaxalign.tracking.workdir import read_run

    run = read_run(workdir)
    key, filled = (Path(options[name]).expanduser() for name in ("key", "ratings"))
    rated, path, replaces = import_ratings(run.path, answers_of(run), key, filled, options["rater"])
    print(rates_sentence(run, rated.models, {rated.rater: rated.better}))
    if missing := rated.count(None):
        print(f"Pairs without a rating: {missing:,} of {len(rated.pairs):,}.")
    print(f"{'replaced' if replaces else 'written to'} {path}", flush=True)
    if (run.path / "report.html").exists():
        print(f"added to {render_report(run.path)}", flush=True)


def _read(arguments: Sequence[str]) -> tuple[str, Path, dict[str, str]]:
    """(export or import, the work directory, the options of the action).

    Raises:
        UserError: an argument is missing or unknown, or has another value than expected.
    """
    action = arguments[0] if arguments else ""
    if action not in _FLAGS:
        raise UserError(f"the first argument is {action!r}; export or import is expected")
    options, workdirs, waiting = dict(_FLAGS[action]), [], iter(arguments[1:])
    for argument in waiting:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("-"):
            workdirs.append(argument)
        elif argument.startswith("--") and name in options:
            options[name] = value if equals else next(waiting, "")
            if not options[name]:
                raise UserError(f"--{name} has no value; set it as --{name}=VALUE")
        else:
            raise UserError(f"{argument.partition('=')[0]} is not a flag of ratings {action}; --help lists them")
    if len(workdirs) != 1:
        raise UserError(f"{len(workdirs)} work directories are given; one is expected, such as runs/NAME")
    lacking = next((name for name in _REQUIRED[action] if not options[name]), None)
    if lacking:
        raise UserError(f"--{lacking} is missing; ratings {action} needs it (--help)")
    for name in ("pairs", "seed"):
        if name in options and not (options[name].isdecimal() and int(options[name]) >= (name == "pairs")):
            raise UserError(f"--{name} is {options[name]!r}; a whole number of at least {int(name == 'pairs')} is expected")
    return action, Path(workdirs[0]).expanduser(), options


if __name__ == "__main__":
    sys.exit(main())
