"""Memory that malloc keeps for the process is returned to the system after a compilation."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
import jax
from jaxalign.parallel.freed_memory import return_freed_memory

def resident():  # Anonymous memory in bytes.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def hold_and_free():
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(4096) for _ in range(50_000)]  # 200 MB, in blocks below the size that malloc maps.
    for block in blocks:
        ctypes.memset(block, 1, 4096)
    for block in blocks[:-1]:  # The last block keeps malloc from shortening the heap.
        library.free(block)

jax.jit(lambda x: x + 1)(1.0)
if sys.argv[1] == "return":
    return_freed_memory()
    return_freed_memory()
before = resident()
hold_and_free()
jax.jit(lambda x: x + 2)(1.0)
print((resident() - before) >> 20)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize("mode, least, most", [("keep", 150, 250), ("return", -50, 50)])
def test_memory_freed_before_a_compilation_is_returned(mode, least, most):
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], check=True, stdout=subprocess.PIPE, text=True)
    assert least <= int(done.stdout) <= most, f"MB kept: {done.stdout}"
