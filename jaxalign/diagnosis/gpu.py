"""Runs `benchmarks/gpu.py`, which tests and measures the first GPU, in a clone of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxalign.diagnosis.findings import Finding
from jaxalign.errors import UserError

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def measure(results: Path, *words: str) -> Iterator[Finding]:
    """Yields the findings of the script while it runs.

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
