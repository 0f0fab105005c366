"""The entry point `python -m jaxalign.judge_audit`: measures a judge on pairs of answers of which the better one is known.

Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxalign import train
from jaxalign.commands import run_command
from jaxalign.errors import UserError

_USAGE = """usage: python -m jaxalign.judge_audit --config=FILE [--workdir=DIR] [--stage=compare|evaluate] [--limit=N]
                                      [--out=FILE] [--config.FIELD=VALUE ...]

Asks the judge of a run about gold pairs in both orders, and prints its accuracy, its agreement with the correct outcomes, and
its preferences for a position or for length, with 95% intervals (docs/labels.md, "Auditing a judge"). A jury is shown beside
its members. The pairs are those of config.judge.audit, or a built-in set.

  --config=FILE         a config file as for jaxalign.train, with any --config.FIELD=VALUE
  --workdir=DIR         the run; default runs/<name of FILE>. Only a judge that the run trains must exist there
  --stage=STAGE         the stage whose judge is audited: compare (default) or evaluate
  --limit=N             read only the first N pairs of each file
  --out=FILE            the JSON file with the results; default WORKDIR/judge_audit.json, which the report shows
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints and writes the audit, and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _audit)


def _audit(argv: list[str]) -> None:
    own, rest = _take_own(argv[1:])
    config, workdir, _ = train.read_arguments([argv[0], *rest])
    # Imported here so that a mistyped flag is reported without importing JAX.
    from jaxalign.data.chat.model_style import resolve_auto
    from jaxalign.parallel.compile_cache import use_compile_cache
    from jaxalign.parallel.precision import use_matmul_precision
    from jaxalign.stages.shared.base import StageContext, write_json
    from jaxalign.stages.shared.judge_audit import audit_judge
    from jaxalign.tracking.judge_audit import FILE, render
    from jaxalign.tracking.report.page import render_report

    config = resolve_auto(config)
    use_compile_cache(config.compile_cache)
    use_matmul_precision(config.model.matmul_precision)
    content = audit_judge(StageContext(config, workdir, workdir / own["stage"], False), own["limit"])
    path = Path(own["out"]).expanduser() if own["out"] else workdir / FILE
    try:
        write_json(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give another file as --out") from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # For terminals that cannot show every character.
    print(f"{render(content)}\n\nwritten to {path}", flush=True)
    if path == workdir / FILE and (workdir / "report.html").exists():
        print(f"added to {render_report(workdir)}", flush=True)


def _take_own(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """This command's flags, and the remaining arguments, which `train` parses.

    Raises:
        UserError: a flag has no value, or an invalid one.
    """
    options, rest = train.take_options(arguments, ("stage", "limit", "out"))
    own: dict[str, Any] = {"stage": "compare", "limit": "0", "out": ""} | options
    if own["stage"] not in ("compare", "evaluate"):
        raise UserError(f"--stage is {own['stage']!r}; it must be compare or evaluate")
    if not own["limit"].isdecimal():
        raise UserError(f"--limit is {own['limit']!r}; a number of pairs is expected, or 0 for all")
    return own | {"limit": int(own["limit"])}, rest


if __name__ == "__main__":
    sys.exit(main())
