"""The size of the folder of compiled programs."""

import jax
import pytest

from jaxalign.parallel import compile_cache

OPTIONS = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def restored(monkeypatch):
    """Restores JAX's options, and removes the variables that take precedence."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    yield monkeypatch
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_has_a_limit_and_its_old_programs_can_be_removed(restored, tmp_path):
    (tmp_path / "jit_old-cache").write_bytes(b"program")
    compile_cache.use_compile_cache(str(tmp_path))
    assert jax.config.jax_compilation_cache_max_size == compile_cache.LARGEST_CACHE
    assert (tmp_path / "jit_old-atime").read_bytes() == bytes(8)


def test_a_size_in_the_environment_takes_precedence(restored, tmp_path):
    restored.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "12345")
    jax.config.update("jax_compilation_cache_max_size", 12345)
    compile_cache.use_compile_cache(str(tmp_path))
    assert jax.config.jax_compilation_cache_max_size == 12345
