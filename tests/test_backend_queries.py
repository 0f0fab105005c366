"""Code that builds programs asks the devices of a mesh, not the backend: programs also compile for devices that are absent."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxalign"
QUERIES = {"default_backend", "get_backend", "backends", "xla_bridge", "devices", "local_devices", "device_count",
           "local_device_count"}
# These run on the devices of the process: they make its mesh, or examine, measure or place what runs on it.
ALLOWED = {
    "diagnosis/machine.py", "diagnosis/selftest.py", "parallel/mesh.py", "parallel/sharding.py", "rl/placing.py",
    "rl/program_times.py", "stages/shared/micro_batches.py", "stages/shared/placements.py", "starter/memory.py",
    "steps/offload.py", "tracking/system.py",
}


def queries(source: str) -> set[str]:
    """The names in `QUERIES` that the source takes from jax or from a module of it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in QUERIES and isinstance(node.value, ast.Name | ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            names |= {node.attr} if isinstance(root, ast.Name) and root.id == "jax" else set()
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "jax":
            names |= {alias.name for alias in node.names} & QUERIES
    return names


def test_queries_are_recognised():
    assert queries("import jax\njax.devices()") == {"devices"}
    assert queries("import jax\njax.extend.backend.get_backend('gpu')") == {"get_backend"}
    assert queries("from jax.extend.backend import get_backend") == {"get_backend"}
    assert not queries("mesh.devices.flat[0].platform")


def test_only_the_code_around_a_run_asks_the_backend():
    sources = {str(file.relative_to(PACKAGE)): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    asking = {file for file, text in sources.items() if any(name in text for name in QUERIES) and queries(text)}
    assert asking <= ALLOWED, "ask the devices of the mesh (`Sharding.platform`, `Sharding.nvidia`) instead"
    assert asking == ALLOWED, "remove the files that no longer ask from ALLOWED"
