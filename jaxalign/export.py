"""The entry point `python -m jaxalign.export`: writes the rows that a run made as data sets for other libraries, with a card.

`stages/shared/exported_sets.py` does the work. Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on
stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxalign.commands import explain_writing, parse_flags, run_command
from jaxalign.errors import UserError

_SETS = ("sft", "preference", "labels")
_FORMATS = ("jsonl", "parquet")
_USAGE = """usage: python -m jaxalign.export WORKDIR --out=DIR [--sets=NAME,...] [--format=NAME]

  WORKDIR          the work directory of a run with stage revise or stage compare
  --out=DIR        a new folder, which datasets.load_dataset loads; a failed export leaves nothing there
  --sets=NAME,...  the sets to write: sft (answers to imitate), preference (pairs with a decided label) and labels (all pairs
                   with the judge's verdicts); default: all that the run has made
  --format=NAME    jsonl or parquet; default jsonl

Models are exported by jaxalign.convert.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exports and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _export, explain_writing)


def _export(argv: list[str]) -> None:
    workdir, values = _read_arguments(argv)
    from jaxalign.stages.shared.exported_sets import export_sets

    names = [name for name in _SETS if name in (values.sets or ())]
    for sentence in export_sets(workdir.expanduser(), Path(values.out).expanduser(), names, values.format):
        print(sentence)


def _read_arguments(argv: Sequence[str]) -> tuple[Path, flags.FlagValues]:
    """(the work directory, the flags)."""
    values = flags.FlagValues()
    flags.DEFINE_string("out", None, "The new folder.", flag_values=values)
    flags.DEFINE_list("sets", None, "The sets to write.", flag_values=values)
    flags.DEFINE_enum("format", "jsonl", _FORMATS, "The format of the files.", flag_values=values)
    given = parse_flags(values, argv, named_only=False)
    if len(given) != 1:
        what = "no work directory is given" if not given else f"{given[1]!r} is not expected on the command line"
        raise UserError(f"{what}; exactly one work directory of a run is expected, such as runs/quickstart")
    if not values.out:
        raise UserError("--out is not given; it must be a new folder")
    wrong = [name for name in values.sets or () if name not in _SETS]
    if wrong:
        raise UserError(f"--sets has {wrong[0]!r}; the sets are {', '.join(_SETS)}")
    return Path(given[0]), values


if __name__ == "__main__":
    sys.exit(main())
