"""The entry point `python -m jaxalign.track`: sends the metrics of a work directory to a tracker, during or after a run.

Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130 after SIGINT.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from jaxalign.commands import explain, output_may_fail, run_command
from jaxalign.config import TrackingConfig
from jaxalign.config.arguments import section_from
from jaxalign.errors import UserError
from jaxalign.registry.trackers import TRACKERS
from jaxalign.storage import LocalStorage
from jaxalign.tracking.sinks.replay import send_all

_USAGE = f"""usage: python -m jaxalign.track --workdir=DIR --to=NAME [--project=NAME] [--group=NAME] [--directory=DIR]
                                [--tags=TAG,...] [--samples=N]

Sends the metrics, results, samples, histograms and report of a run to a tracker. What it has already is not sent again.

  --workdir=DIR         the work directory of a run, finished or interrupted
  --to=NAME             the tracker: {", ".join(TRACKERS.builtin)}
  --project=NAME, --group=NAME, --directory=DIR, --tags=TAG,..., --samples=N
                        as config.tracking.project and so on; by default the values of the run's config
"""
_OPTIONS = ("workdir", "to", "project", "group", "directory", "tags", "samples")


def main(argv: Sequence[str] | None = None) -> int:
    """Sends a run and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _send, _explain)


def _send(argv: list[str]) -> None:
    options = _parse(argv[1:])
    workdir = Path(options["workdir"])
    if not (workdir / "config.json").is_file():
        raise UserError(f"--workdir is {options['workdir']!r}, which has no config.json; give the work directory of a run")
    with output_may_fail(), LocalStorage(workdir).lock():
        for sent in send_all(options["to"], _settings(options, workdir), workdir.resolve()):
            print(f"{sent.run}: {sent.steps} steps and {sent.attachments} attachments sent", flush=True)


def _explain(error: BaseException) -> tuple[str, int] | None:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; run the same command again to send the rest", 130
    return explain(error)


def _parse(arguments: Sequence[str]) -> dict[str, str]:
    """The options by name. Raises UserError for one that is unknown, has no value or is missing."""
    options: dict[str, str] = {}
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in _OPTIONS:
            near = get_close_matches(name, _OPTIONS, n=1)
            known = ", ".join(f"--{option}" for option in _OPTIONS)
            hint = f"did you mean --{near[0]}?" if near else f"one of {known} is expected"
            raise UserError(f"{argument.partition('=')[0]!r} is not an option of jaxalign.track; {hint}")
        options[name] = value if equals else next(waiting, "")
        if not options[name]:
            raise UserError(f"--{name} has no value; set it as --{name}=VALUE")
    for name in ("workdir", "to"):
        if name not in options:
            raise UserError(f"--{name} is not given; give --workdir=DIR and --to=NAME")
    if "samples" in options and not options["samples"].isdecimal():
        raise UserError(f"--samples is {options['samples']!r}; a number of at least 0 is expected")
    return options


def _settings(options: dict[str, str], workdir: Path) -> TrackingConfig:
    """The settings of the run's config, with those of the command line."""
    from jaxalign.tracking.workdir import read_config

    stored = read_config(workdir).get("tracking") or {}
    fields = {name: value for name, value in stored.items() if name in vars(TrackingConfig()) and name != "trackers"}
    fields |= {name: options[name] for name in ("project", "group", "directory") if name in options}
    fields |= {"tags": tuple(tag for tag in options["tags"].split(",") if tag)} if "tags" in options else {}
    fields |= {"samples": int(options["samples"])} if "samples" in options else {}
    return section_from(TrackingConfig(trackers=(options["to"],)), fields, "tracking")


if __name__ == "__main__":
    sys.exit(main())
