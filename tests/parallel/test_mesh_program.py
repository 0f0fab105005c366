"""Jitted programs with options for GPUs. tests/planner/test_gpu_topology.py tests the options, which need the GPU compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxalign.parallel.mesh_program import IN_ONE_PART, ON_CPUS, OVERLAP, MeshProgram, available, supports
from jaxalign.rollout.ring import GPU_OPTIONS, IN_PLACE


def rows(devices) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(Mesh(np.array(devices), ("fsdp",)), PartitionSpec("fsdp"))
    return jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)


def doubled(x):
    """Twice x."""
    return 2 * x


def test_a_program_is_called_like_the_result_of_jit():
    program = MeshProgram(doubled, donate_argnames=("x",))
    assert (program.__name__, program.__doc__) == ("doubled", "Twice x.")
    assert program(jnp.float32(3.0)) == 6.0
    assert jax.eval_shape(program, rows(jax.devices())).shape == (8,)
    assert jax.jit(lambda x: program(x) + 1)(jnp.float32(3.0)) == 7.0
    assert program.lower(rows(jax.devices())).args_info[0][0].donated


def test_options_that_xla_does_not_have_are_left_out_with_a_warning(caplog):
    assert all(supports(*option) for options in (OVERLAP, IN_ONE_PART, GPU_OPTIONS, IN_PLACE) for option in options.items())
    assert not supports("xla_gpu_an_option_of_another_version", True)
    assert "without the option xla_gpu_an_option_of_another_version" in caplog.text


def test_the_options_of_cpus_reach_the_compiler_unless_xla_flags_sets_them(monkeypatch):
    given, jit = [], jax.jit

    def noting(*args, **kwargs):
        given.append(kwargs.get("compiler_options"))
        return jit(*args, **kwargs)

    monkeypatch.setattr(jax, "jit", noting)
    monkeypatch.setenv("XLA_FLAGS", "")
    MeshProgram(doubled).lower(rows(jax.devices())).compile()
    assert given[-1] == ON_CPUS
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=true")
    assert available(ON_CPUS) is None
    MeshProgram(doubled).lower(rows(jax.devices())).compile()
    assert given[-1] is None


def test_a_program_inside_another_has_the_options_of_the_other(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    program, x = MeshProgram(lambda x, y: x + y), jax.device_put(jnp.ones(8), rows(jax.devices()).sharding)
    assert jax.jit(lambda y: program(x, y))(jnp.float32(3.0)).tolist() == [4.0] * 8
