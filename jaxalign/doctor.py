"""The entry point `python -m jaxalign.doctor`: examines the machine and tests jaxalign on its devices (docs/doctor.md).

Exit codes: 0 no problem, 1 a problem, 2 a mistake in the arguments (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from absl import flags

from jaxalign.commands import parse_flags, run_command
from jaxalign.diagnosis.findings import Finding
from jaxalign.errors import UserError

_USAGE = """usage: python -m jaxalign.doctor [--noselftest] [--workdir=DIR] [--json]
       python -m jaxalign.doctor --gpu [--results=FILE]

Prints the versions, devices, huge pages, compile cache and free disk space of this machine, with a remedy for each problem, and
runs a tiny PPO run with its step-0 checks on the devices (about a minute).

  --noselftest    examines the machine only, in seconds
  --workdir=DIR   the folder whose disk a run would fill; default: the current folder
  --json          prints one JSON object per finding
  --gpu           also runs tests and benchmarks on the first GPU, in a clone of the repository (8 minutes), and writes all
                  results to one file
  --results=FILE  the file that --gpu writes; default gpu_results.json

Exit codes: 0 no problem, 1 a problem, 2 a mistake in the arguments.
"""

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the findings and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _examine)


def _examine(argv: list[str]) -> int:
    values = read_arguments(argv)
    workdir = Path(values.workdir).expanduser()
    if not workdir.is_dir():
        raise UserError(f"--workdir={values.workdir} is not a folder; give an existing one, on the disk of your runs")
    findings = _print_all(_findings(values, workdir), values.json)
    return 1 if any(finding.status == "problem" for finding in findings) else 0


def _findings(values: flags.FlagValues, workdir: Path) -> Iterator[Finding]:
    from jaxalign.diagnosis.machine import examine  # Imported here so that a mistyped flag does not wait for JAX.
    from jaxalign.parallel.simulated import enough_threads

    enough_threads()
    if values.gpu:
        yield from measure(Path(values.results).expanduser())
        return
    machine = examine(workdir)
    yield from machine
    if not values.selftest:
        return
    if any(finding.topic == "devices" and "cannot start" in finding.text for finding in machine):
        yield Finding("self-test", "problem", "not run, because JAX cannot start")
        return
    from jaxalign.diagnosis.selftest import self_test

    yield from self_test()


def measure(results: Path, *words: str) -> Iterator[Finding]:
    """Runs `benchmarks/gpu.py`, which tests and measures the first GPU, and yields its findings while it runs.

    Args:
      results: the JSON file that it writes.
      words: further arguments of the script.

    Raises:
      UserError: this is no clone of the repository.
    """
    if not SCRIPT.is_file():
        raise UserError(f"--gpu runs benchmarks/gpu.py of the repository, and {SCRIPT.parents[1]} has none; run it in a clone, "
                        "after pip install -e '.[cuda,test]'")
    command = [sys.executable, str(SCRIPT), "--json", "--results", str(results), *words]
    last = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                last = Finding(**json.loads(line))
                yield last
        finally:
            if sys.exc_info()[0] is not None:  # Ctrl-C also reaches the script, which ends its parts.
                process.wait()
    if last is None or last.topic not in ("results", "gpu"):
        yield Finding("gpu", "problem", f"benchmarks/gpu.py ended with code {process.returncode} before its results")


def _print_all(findings: Iterable[Finding], as_json: bool) -> list[Finding]:
    """Prints each finding when it is known, and returns all."""
    printed = []
    for finding in findings:
        line = json.dumps(finding._asdict()) if as_json else finding.line()
        print(line, flush=True)
        printed.append(finding)
    if not as_json:
        problems, notes = (sum(finding.status == status for finding in printed) for status in ("problem", "note"))
        print(f"{problems} {'problem' if problems == 1 else 'problems'}, {notes} {'note' if notes == 1 else 'notes'}")
    return printed


def read_arguments(argv: Sequence[str]) -> flags.FlagValues:
    """The values of the flags. `argv` includes the program's name.

    Raises:
      UserError: an argument is not a flag, or does not go with the others.
    """
    values = flags.FlagValues()
    flags.DEFINE_bool("selftest", True, "Whether to run the self-test.", flag_values=values)
    flags.DEFINE_string("workdir", ".", "The folder of the runs.", flag_values=values)
    flags.DEFINE_bool("json", False, "Whether to print JSON.", flag_values=values)
    flags.DEFINE_bool("gpu", False, "Whether to test and measure the first GPU.", flag_values=values)
    flags.DEFINE_string("results", "gpu_results.json", "The file of --gpu.", flag_values=values)
    parse_flags(values, argv)
    if values["results"].present and not values.gpu:
        raise UserError("--results is given without --gpu, which writes the file; add --gpu, or omit it")
    if values.gpu and values["selftest"].present:
        raise UserError("--selftest is given with --gpu, which always runs the self-test; omit one of them")
    return values


if __name__ == "__main__":
    sys.exit(main())
