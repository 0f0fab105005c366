"""The folder of compilers' reports: what is read back, and what is compiled again."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxalign.planner import compiler
from jaxalign.planner.compiler import compile_lowered, lower


def lowered(size: int = 8, name: str = "x"):
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    array = jax.ShapeDtypeStruct((8, size), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    step = jax.jit({"x": lambda x: jnp.sum(x, 0), "y": lambda y: jnp.sum(y, 0)}[name])
    return lower(step, (array,))


@pytest.fixture
def compilations(monkeypatch) -> list:
    """The programs that the compiler was asked for."""
    seen, compile_one = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda program: (seen.append(program.key), compile_one(program))[1])
    return seen


def test_a_report_is_read_back(tmp_path, compilations):
    first = compile_lowered(lowered(), tmp_path, "cpu")
    assert compile_lowered(lowered(), tmp_path, "cpu") == first and len(compilations) == 1
    assert first.memory.arguments == 8 * 4 and first.kept == (True,) and "all-reduce" in first.text
    assert first.replicated == (("result", (8,), 4),)


def test_another_program_name_topology_or_flag_is_compiled(tmp_path, monkeypatch, compilations):
    compile_lowered(lowered(), tmp_path, "cpu")
    compile_lowered(lowered(size=4), tmp_path, "cpu")
    compile_lowered(lowered(name="y"), tmp_path, "cpu")  # The report has the names of arguments.
    compile_lowered(lowered(), tmp_path, "other")
    monkeypatch.setattr(compiler, "_compiler", lambda: ["newer"])
    compile_lowered(lowered(), tmp_path, "cpu")
    assert len(compilations) == 5


def partitioned(scale: float):
    """A lowered program that calls a function with a partitioning rule. Each call builds both again, as a new process does."""

    @functools.partial(custom_partitioning, static_argnums=(1,))
    def scaled(x, factor):
        return x * factor

    scaled.def_partition(
        lambda factor, mesh, shapes, result: (mesh, lambda x: x * factor, shapes[0].sharding, (shapes[0].sharding,)),
        sharding_rule="i j -> i j",
    )
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    array = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    return lower(jax.jit(lambda x: scaled(x, scale)), (array,))


def test_the_key_has_the_parameters_of_a_partitioned_function_and_not_its_address():
    assert partitioned(2.0).key == partitioned(2.0).key != partitioned(3.0).key


def test_a_damaged_report_is_compiled_again(tmp_path, compilations):
    first = compile_lowered(lowered(), tmp_path, "cpu")
    (file,) = tmp_path.glob("*-report")
    file.write_bytes(file.read_bytes()[:100])
    assert compile_lowered(lowered(), tmp_path, "cpu") == first and len(compilations) == 2
    assert compile_lowered(lowered(), tmp_path, "cpu") == first and len(compilations) == 2


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path):
    (tmp_path / "file").write_text("")
    assert compile_lowered(lowered(), tmp_path / "file" / "plans", "cpu").memory is not None


def test_only_the_most_recently_used_reports_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "_MOST_REPORTS", 1)
    compile_lowered(lowered(), tmp_path, "a")
    compile_lowered(lowered(), tmp_path, "b")
    kept = max(tmp_path.glob("*-report"), key=lambda file: file.stat().st_mtime_ns)
    compiler.remove_old_reports(tmp_path)
    assert list(tmp_path.glob("*-report")) == [kept]
