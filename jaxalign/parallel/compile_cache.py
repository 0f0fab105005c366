"""The folder that keeps compiled programs between runs."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from pathlib import Path

LARGEST_CACHE = 4 * 2**30
"""The default size of a folder in bytes; beyond it, JAX deletes the programs that were not used for the longest time."""


def use_compile_cache(folder: str | None) -> None:
    """Sets the folder or bucket for compiled programs.

    Args:
      folder: the folder, or a bucket's URL; "" is ~/.cache/jaxalign; None: no folder is set. A folder or size set through JAX's
        own environment variables takes precedence. A folder keeps at most `LARGEST_CACHE` bytes; a bucket has no limit.
    """
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    import jax  # Imported here so that a run with nothing to compute does not import JAX.

    place = cache_folder(folder)
    if "://" not in place:  # JAX itself reads and writes buckets.
        if _try_to_write(place) and "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
            jax.config.update("jax_compilation_cache_max_size", LARGEST_CACHE)
    jax.config.update("jax_compilation_cache_dir", place)
    # A run starts with tens of small programs; reading them takes a third of the time of compiling them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A process killed while writing leaves a partial entry. JAX then compiles again and would warn at every run; on a full
    # disk it would warn for every program.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")


def cache_folder(folder: str) -> str:
    """The folder or bucket that holds the programs of a run with `compile_cache=folder`."""
    place = os.environ.get("JAX_COMPILATION_CACHE_DIR") or folder or "~/.cache/jaxalign"
    return place if "://" in place else str(Path(place).expanduser())


def cache_limit() -> int | None:
    """The largest size of the folder in bytes that JAX applies in this process; None if it has no limit."""
    import jax

    limit = jax.config.jax_compilation_cache_max_size
    return None if limit < 0 else limit


@functools.cache
def _try_to_write(folder: str) -> bool:
    """Whether a folder can be written; prints once that it cannot. Existing entries can still be read."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        # JAX removes programs by the time of their last use, which it does not store for a folder without a limit.
        for program in Path(folder).glob("*-cache"):
            used = program.with_name(program.name.removesuffix("-cache") + "-atime")
            if not used.exists():
                used.write_bytes(bytes(8))
        return True
    except OSError as error:
        why = error.strerror or error
        print(f"config.compile_cache: {folder} cannot be written ({why}); programs of this run are not cached", flush=True)
        return False
