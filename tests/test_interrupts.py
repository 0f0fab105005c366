"""A signal ends a process with its exit code, one sentence and no traceback, whatever the main thread is doing."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxalign import interrupts

ROOT = pathlib.Path(__file__).resolve().parents[1]
BEGIN = """
import gc, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # Background processes ignore SIGINT by default.
from jaxalign import interrupts
interrupts.install()
"""
COLLECTING = BEGIN + """
gc.callbacks.append(lambda *_: time.sleep(0.001))  # Python ignores an exception that is raised here.
print("up", flush=True)
while True:
    gc.collect()
"""
STEPS = BEGIN + """
try:
    with interrupts.at_steps():
        print("up", flush=True)
        while not interrupts.received():
            time.sleep(0.01)
        time.sleep(1.0 if sys.argv[1] == "short" else 100.0)
except KeyboardInterrupt:
    print("saved", flush=True)
    sys.exit(interrupts.exit_code())
"""
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
pytestmark = pytest.mark.process


def started(program, *arguments):
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_within_a_callback_of_the_garbage_collector_ends_the_process(number, code):
    process = started(COLLECTING)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (code, f"{interrupts.SENTENCE}\n")


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_steps_end_by_themselves(number, code):
    process = started(STEPS, "short")
    process.send_signal(number)
    out, said = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "saved\n") and "ends after this step" in said


def test_a_second_signal_ends_long_steps_at_once():
    process = started(STEPS, "long")
    process.send_signal(signal.SIGINT)
    assert "ends after this step" in process.stderr.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, f"{interrupts.SENTENCE}\n") and time.monotonic() - began < 5


def test_a_signal_during_the_imports_gives_no_traceback():
    """The module itself is imported within 0.1 s; JAX and the rest take several times that."""
    process = subprocess.Popen([sys.executable, "-c", BEGIN + "print('up', flush=True)\nimport jax, jaxalign.train"], cwd=ROOT,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=30)[1], process.returncode) == (f"{interrupts.SENTENCE}\n", 130)
