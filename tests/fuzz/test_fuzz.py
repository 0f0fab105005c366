"""A short run of the fuzzer of all readers: every input is accepted, or refused in one short sentence."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_mutations import mutate_json
from benchmarks.fuzz_readers import KINDS


@pytest.mark.slow
@pytest.mark.process
def test_no_reader_fails_hangs_or_echoes():
    quick = [kind for kind in KINDS if kind not in ("run", "weights")]  # Their files are made by a run.
    counts, findings, _ = fuzz.fuzz(quick, seed=5, inputs=400)
    assert not findings, "\n".join(map(str, findings))
    tried = {kind: sum(count for (name, _), count in counts.items() if name == kind) for kind in quick}
    assert min(tried.values()) >= 10 and sum(tried.values()) >= 400, tried


def _raise(error):
    raise error


@pytest.mark.parametrize(("read", "words"), [
    (lambda: None, "accepted"),
    (lambda: _raise(fuzz.UserError("a is 1; 2 is expected")), "refused"),
    (lambda: _raise(KeyError("a")), "KeyError"),
    (lambda: _raise(SystemExit(0)), "SystemExit"),
    (lambda: _raise(fuzz.UserError("a\nb")), "message of 3 characters"),
])
def test_reactions_are_told_apart(tmp_path, read, words):
    reaction, is_finding, _ = fuzz._reaction(lambda folder, given: read(), tmp_path, None)
    assert reaction.startswith(words)
    assert is_finding == (words not in ("accepted", "refused"))


_ENDING = """
import multiprocessing, os
from benchmarks import fuzz

def end_at_the_first(folder, given):
    if given == "x":
        os._exit(3)

def text(chance, folder, share):
    with (folder.parent / "made").open("a") as file:
        file.write("x" if share else "")
    return (folder.parent / "made").read_text() if share else ""

fuzz.KINDS["flags"] = fuzz.Kind(lambda folder: None, text, end_at_the_first)
fuzz._context = multiprocessing.get_context("fork")  # JAX, whose threads do not survive a fork, is not imported.
counts, findings, _ = fuzz.fuzz(["flags"], seed=0, inputs=3)
assert [finding.number for finding in findings] == [0], findings
assert sum(counts.values()) == 3, counts
"""


@pytest.mark.process
def test_an_input_that_ends_the_process_is_found_and_the_others_are_tried():
    subprocess.run([sys.executable, "-c", _ENDING], check=True, cwd=fuzz.REPOSITORY)


def test_a_seed_determines_the_inputs():
    first, again = ([mutate_json(random.Random(seed), b'{"a": [1, 2]}') for seed in range(50)] for _ in range(2))
    assert first == again and len(set(first)) > 20
