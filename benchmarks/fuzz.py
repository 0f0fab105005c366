"""Gives damaged and hostile files, settings and messages to the readers of the package, and lists every wrong reaction.

    python benchmarks/fuzz.py --seed=1 --inputs=10000
    python benchmarks/fuzz.py --kind=tokenizer --seed=7 --minutes=30

Each input is a mutation of a valid one (`fuzz_mutations.py`) for one reader (`fuzz_readers.py`). A reader may accept it, or
raise a UserError of one sentence. Anything else is a finding: another exception, a longer message, an end of the process, more
than 10 seconds or 2 GB of memory. A finding is printed with the flags that repeat it. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.fuzz_readers import KINDS, PLACES, Kind  # noqa: E402
from jaxalign.errors import UserError  # noqa: E402

SECONDS = 10
MEMORY = 2 * 2**30
_PREPARATION = 300
_context = multiprocessing.get_context("spawn")  # Threads of JAX do not survive a fork.
LONGEST_MESSAGE = 2000
_SHOWN = 300  # Characters of an input that a finding shows.


@dataclasses.dataclass(frozen=True)
class Finding:
    """A wrong reaction to one input. `input` is the beginning of its description."""

    kind: str
    seed: int
    number: int
    reaction: str
    input: str

    def __str__(self) -> str:
        return (f"FINDING {self.reaction}\n  repeat: python benchmarks/fuzz.py --kind={self.kind} --seed={self.seed} "
                f"--first={self.number} --inputs=1\n  input: {self.input}")


class _TooSlow(BaseException):
    """The alarm of an input. Not an Exception, so that readers do not catch it."""


class Tried(NamedTuple):
    """The number of reactions by kind and type, the findings, and the longest time of an input of each kind in seconds."""

    counts: Counter
    findings: list[Finding]
    longest: dict[str, float]


def fuzz(kinds: Sequence[str], seed: int, inputs: int, first: int = 0, minutes: float = 0.0) -> Tried:
    """Gives inputs to the readers of each of `kinds`.

    Args:
        kinds: keys of `KINDS`.
        seed: determines the inputs, with their number.
        inputs: the number of inputs in all, which the kinds share according to `Kind.share`; each has at least one.
        first: the number of the first input.
        minutes: start no further input after this time; 0 for no limit.
    """
    until = time.time() + minutes * 60 if minutes else float("inf")
    whole = sum(KINDS[kind].share for kind in kinds)
    tasks = [(kind, number) for kind in kinds
             for number in range(first, first + math.ceil(inputs * KINDS[kind].share / whole))]
    tried = Tried(Counter(), [], {})
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        at = 0
        while at < len(tasks) and time.time() < until:
            at += _in_child(Path(folder), seed, tasks[at:], until, tried)
    return tried


def _in_child(folder: Path, seed: int, tasks: list[tuple[str, int]], until: float, all_tried: Tried) -> int:
    """Tries inputs in one child process until they are done or the child ends. -> how many were tried."""
    ours, theirs = _context.Pipe(duplex=False)
    child = _context.Process(target=_child, args=(theirs, folder, seed, tasks, until))
    child.start()
    theirs.close()
    tried, description = 0, None
    counts, findings, longest = all_tried
    try:
        while ours.poll(_PREPARATION if description is None else 4 * SECONDS):
            match ours.recv():
                case None:
                    return len(tasks)
                case str(description):
                    pass
                case reaction, is_finding, seconds:
                    kind = tasks[tried][0]
                    counts[kind, reaction.partition(":")[0]] += 1
                    longest[kind] = max(longest.get(kind, 0.0), seconds)
                    if is_finding:
                        _report(findings, Finding(tasks[tried][0], seed, tasks[tried][1], reaction, description))
                    tried, description = tried + 1, None
    except EOFError:
        pass
    finally:
        child.kill()
        child.join()
    if description is None:
        raise RuntimeError(f"the process ended with code {child.exitcode} while it prepared {tasks[tried]}")
    counts[tasks[tried][0], "crash or hang"] += 1
    _report(findings, Finding(*tasks[tried][:1], seed, tasks[tried][1], "the process crashed or hung", description))
    return tried + 1


def _report(findings: list[Finding], finding: Finding) -> None:
    findings.append(finding)
    print(finding, flush=True)


def _child(pipe: Connection, folder: Path, seed: int, tasks: list[tuple[str, int]], until: float) -> None:
    """Tries inputs; sends a description before each, and (reaction, is finding, seconds) after it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGALRM, _stop)
    prepared = None
    for kind, number in tasks:
        if time.time() > until:
            break
        fuzzed, place, own = KINDS[kind], folder / PLACES.get(kind, kind), folder / "input"
        if kind != prepared:
            _prepare(fuzzed, place)
            prepared = kind
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(place, own)
        given = fuzzed.mutate(random.Random(f"{kind} {seed} {number}"), own, 1.0)
        pipe.send(repr(given)[:_SHOWN])
        reaction = _reaction(fuzzed.read, own, given)
        if reaction[0].startswith("hang"):  # Other programs may have used the processor: a real one repeats.
            reaction = _reaction(fuzzed.read, own, given)
        pipe.send(reaction)
    pipe.send(None)


def _prepare(fuzzed: Kind, place: Path) -> None:
    """Writes the valid files, reads them once, which imports and compiles, and limits the memory from here on."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if not place.exists():
            place.mkdir()
            fuzzed.prepare(place)
        with contextlib.suppress(UserError):
            fuzzed.read(place, fuzzed.mutate(random.Random(0), place, 0.0))
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def _stop(*_) -> None:
    raise _TooSlow


def _reaction(read, folder: Path, given) -> tuple[str, bool, float]:
    """-> (the reaction of a reader to an input in words, whether it is a finding, seconds)."""
    started = time.monotonic()
    reaction, is_finding = _react(read, folder, given)
    return reaction, is_finding, time.monotonic() - started


def _react(read, folder: Path, given) -> tuple[str, bool]:
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            read(folder, given)
        return "accepted", False
    except UserError as error:
        text = str(error)
        if len(text) > LONGEST_MESSAGE or "\n" in text.strip() or not text.isprintable():
            return f"message of {len(text)} characters, {text.count(chr(10))} line breaks: {text[:200]!r}", True
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"message that cannot be printed: {text[:200]!r}", True
        return "refused", False
    except _TooSlow:
        return f"hang: more than {SECONDS} s", True
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "jaxalign" in frame.filename]
        where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:])
        return f"{type(error).__name__}: {str(error)[:200]!r} at {where}", True
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="determines the inputs (default 0)")
    parser.add_argument("--inputs", type=int, default=1000, help="the number of inputs in all (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input of each kind (default 0)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="the kind of input; may be repeated (default: all)")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time (default: no limit)")
    given = parser.parse_args()
    kinds = given.kind or list(KINDS)
    counts, findings, longest = fuzz(kinds, given.seed, given.inputs, given.first, given.minutes)
    by_kind = {kind: {reaction: count for (name, reaction), count in counts.items() if name == kind} for kind in kinds}
    print(json.dumps(by_kind, indent=1))
    print("seconds of the slowest input: " + ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in longest.items()))
    print(f"{sum(counts.values())} inputs, {len(findings)} findings, peak memory of a process "
          f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9:.2f} GB")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
