"""A process ends with its exit code, also if threads of a library wait forever."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.process
@pytest.mark.parametrize(("main", "code", "text"), [
    ("lambda: 2", 2, ""), ("lambda: 1 / 0", 1, "ZeroDivisionError"), ("lambda: 130", 130, ""),
])
def test_a_thread_that_waits_forever_does_not_keep_the_process(main, code, text):
    program = ("import threading; from jaxalign import errors; errors._GRACE_SECONDS = 0.5\n"
               f"threading.Thread(target=threading.Event().wait).start(); errors.run_to_the_end({main})")
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code and text in ended.stderr and time.monotonic() - began < 30


@pytest.mark.process
def test_after_success_threads_finish_their_work(tmp_path):
    program = ("import pathlib, sys, threading, time; from jaxalign.errors import run_to_the_end\n"
               "def work(): time.sleep(1); pathlib.Path(sys.argv[1]).write_text('done')\n"
               "threading.Thread(target=work).start(); run_to_the_end(lambda: 0)")
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], cwd=ROOT, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "done"
