"""The graph of stages: runs them in order, skips what is done, continues what is half done, refuses what changed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import json
import os
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxalign.config import STAGES, Config, schema, to_dict
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.stages.shared.base import (
    DONE,
    Manifest,
    Stage,
    StageContext,
    file_fingerprint,
    fingerprint,
    new_manifest,
    read_manifest,
    write_json,
)
from jaxalign.tracking import table
from jaxalign.tracking.jsonl import write_atomically
from jaxalign.tracking.timing import rest_of

_SEEN_SECONDS = 30.0
_SHOWN = 12  # differences of a stage that an error spells out; the rest is counted

Load = Callable[[str], Stage]


def load_stage(name: str) -> Stage:
    """The stage of that name. Imported only when it is needed: a run that has nothing to do does not load JAX."""
    return importlib.import_module(f"jaxalign.stages.{name}").STAGE


def run(config: Config, workdir: str | os.PathLike, overwrite: bool = False, load: Load = load_stage) -> None:
    """Brings every stage of `config.stages` to done, in order, and prints the final table and the report's path.

    Args:
        config: the whole config.
        workdir: the work directory; made when missing.
        overwrite: redo the stages whose config, files or inputs changed; the old folder is moved aside to STAGE.old-N.
        load: finds a stage by its name.

    Raises:
        UserError: the directory is in use, a stage there was made with other settings, or an input is missing.
    """
    workdir = Path(workdir)
    with hosts.first_alone(lambda: _lock(workdir)):
        _check_alike(config, workdir)
        hosts.once(lambda: _make_ready(config, workdir, overwrite, load))
        for name in config.stages:
            _bring_to_done(name, config, workdir, load)
        hosts.once(lambda: _print_results(config, workdir))


def _check_alike(config: Config, workdir: Path) -> None:
    """Raises UserError in a process that has another config than the first one, or does not see its work directory."""
    if hosts.count() == 1:
        return
    mark = workdir / ".processes"
    word, wanted = hosts.once(lambda: [uuid.uuid4().hex, fingerprint(to_dict(config))])
    hosts.once(lambda: write_atomically(mark, word))
    if fingerprint(to_dict(config)) != wanted:
        raise UserError("this process has another config than process 0; give all the same command, and the same config file")
    if not _appears(mark, word):
        raise UserError(f"the work directory {workdir} is not that of process 0; --workdir must name a folder that all hosts "
                        "share, by the same path on each")
    hosts.wait()
    hosts.once(mark.unlink)


def _appears(path: Path, content: str) -> bool:
    """Whether a file is seen within the time for which a shared file system may still show its folder as it was."""
    until = time.monotonic() + _SEEN_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == content:
                return True
        time.sleep(0.2)
    return False


def _make_ready(config: Config, workdir: Path, overwrite: bool, load: Load) -> None:
    """Refuses what cannot be done, and moves aside what is to be redone."""
    changed = find_changes(config, workdir, load)
    if changed and not overwrite:
        raise UserError(_refusal(workdir, changed))
    for name in changed:
        if name not in config.stages:
            raise UserError(f"stage {name} in {workdir} was made with another config and is to be redone; "
                            f"add {name} to config.stages")
    for name in changed:
        print(f"[{name}] changed; what was there is now in {_move_aside(workdir / name)}", flush=True)
    write_json(workdir / "config.json", to_dict(config))


def find_changes(config: Config, workdir: Path, load: Load = load_stage) -> dict[str, list[str]]:
    """The stages of `workdir` that another config, other files or other inputs made, each with its differences.

    Every stage with a manifest counts that is to run or that one to run reads. A stage's code is loaded only where
    there is no manifest or another config came last: to see what it reads, and to foresee what it will put out.

    Raises:
        UserError: a stage that is to be read is neither done nor in `config.stages`.
    """
    manifests = {name: read_manifest(workdir / name) for name in STAGES}
    sources = _sources(config, manifests, load, checked=_is_last_config(config, workdir))
    changed: dict[str, list[str]] = {}
    output: dict[str, str] = {}
    for name in (name for name in STAGES if name in sources):
        manifest = manifests[name]
        if manifest is None:
            _refuse_foreign(workdir / name)
            inputs = {source: output[source] for source in sources[name]}
            output[name] = new_manifest(load(name), config, inputs).output_hash
            continue
        if manifest.status != DONE and name not in config.stages:
            raise UserError(f"stage {name} is half done in {workdir}, and is to be read; add {name} to config.stages")
        differences = _differences(manifest, config)
        if set(sources[name]) != set(manifest.inputs):
            differences.append(f"it read {_words(manifest.inputs)} and is to read {_words(sources[name])}")
        for source in sources[name]:
            if source in changed or output[source] != manifest.inputs.get(source, output[source]):
                differences.append(f"its input {source} changes")
        if differences:
            changed[name] = differences
        output[name] = manifest.output_hash
    return changed


def _is_last_config(config: Config, workdir: Path) -> bool:
    """Whether the last run that got past the checks had this config, but for the mesh; then recorded inputs are right."""
    try:
        last = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        return last | {"mesh": None} == to_dict(config) | {"mesh": None}
    except (OSError, ValueError, TypeError):
        return False


def _sources(config: Config, manifests: Mapping[str, Manifest | None], load: Load,
             checked: bool) -> dict[str, tuple[str, ...]]:
    """Every stage to run or to be read, with the stages it reads itself. `checked`: as recorded, where it is."""
    sources: dict[str, tuple[str, ...]] = {}
    waiting = [(name, "") for name in config.stages]
    while waiting:
        name, reader = waiting.pop()
        if name in sources:
            continue
        manifest = manifests[name]
        if manifest is None and name not in config.stages:
            raise UserError(f"stage {reader} reads stage {name}, which has not been run here; add {name} to "
                            "config.stages")
        sources[name] = tuple(manifest.inputs) if manifest and checked else tuple(load(name).inputs(config))
        waiting += [(source, name) for source in sources[name]]
    return sources


def _bring_to_done(name: str, config: Config, workdir: Path, load: Load) -> None:
    directory = workdir / name
    resumed = hosts.once(lambda: _begin(name, config, workdir, load))
    if resumed is None:
        return
    _use_compile_cache(config.compile_cache)
    with rest_of(directory / "timing.jsonl"):
        load(name).run(StageContext(config=config, workdir=workdir, directory=directory, resumed=resumed))
    hosts.wait()
    hosts.once(lambda: _finish(name, directory))


def _begin(name: str, config: Config, workdir: Path, load: Load) -> bool | None:
    """Marks a stage as running. Whether it goes on with what is there; None where it is done."""
    directory = workdir / name
    manifest = read_manifest(directory)
    if manifest is not None and manifest.status == DONE:
        print(f"[{name}] done, nothing to compute", flush=True)
        return None
    resumed = manifest is not None
    if manifest is None:
        stage = load(name)
        inputs = {source: read_manifest(workdir / source).output_hash for source in stage.inputs(config)}
        manifest = new_manifest(stage, config, inputs)
        directory.mkdir(parents=True, exist_ok=True)
    # A run may go on under another mesh; the manifest tells which one was last.
    manifest = dataclasses.replace(manifest, mesh=schema.to_plain(config.mesh))
    manifest.write(directory)
    print(f"[{name}] {'continuing' if resumed else 'starting'}", flush=True)
    return resumed


def _finish(name: str, directory: Path) -> None:
    dataclasses.replace(read_manifest(directory), status=DONE).write(directory)
    print(f"[{name}] finished", flush=True)


def _differences(manifest: Manifest, config: Config) -> list[str]:
    """What the stage was made with against what is asked for, "config.NAME was OLD and is NEW".

    A field that did not exist then and has its default now is no difference: a default does what was done before.
    """
    differences, defaults = [], Config()
    for name, old in manifest.config.items():
        try:
            after = _leaves(schema.to_plain(schema.get(config, name)), name)
        except KeyError:
            after = {}
        before = _renamed(_leaves(old, name))
        usual = _leaves(schema.to_plain(schema.get(defaults, name)), name) if after else {}
        after = {leaf: value for leaf, value in after.items() if leaf in before or value != usual[leaf]}
        for leaf in sorted(before.keys() | after.keys()):
            was, now = (repr(side[leaf]) if leaf in side else "not there" for side in (before, after))
            if was != now:
                differences.append(f"config.{leaf} was {was} and is {now}")
    for path, old in manifest.files.items():
        # A file that is gone cannot have changed what was made from it; a stage that still needs it will say so.
        if Path(path).exists() and file_fingerprint(Path(path), path) != old:
            differences.append(f"the content of {path} has changed")
    return differences


def _leaves(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {leaf: item for key, inner in value.items() for leaf, item in _leaves(inner, f"{name}.{key}").items()}
    return {name: value}


def _renamed(leaves: dict[str, Any]) -> dict[str, Any]:
    """The values of an older manifest under the names they have now. One field once ruled every check of RL, and all but the
    sampler's could only warn or stop."""
    policy = leaves.get("ppo.on_sampler_gap")
    if policy is None:
        return leaves
    other = "stop" if policy == "stop" else "warn"
    checks = {"ratio": policy, "sampler_gap": policy, "reference_kl": other, "micro_batches": other}
    kept = {leaf: value for leaf, value in leaves.items() if leaf != "ppo.on_sampler_gap"}
    return kept | {f"ppo.checks.{check}": value for check, value in checks.items()}


def _words(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def _refusal(workdir: Path, changed: Mapping[str, list[str]]) -> str:
    lines = [f"{workdir} holds stages made with another config (nothing was touched; choose another --workdir, or give "
             "--overwrite to redo them, which keeps the old folders as STAGE.old-N):"]
    for name, differences in changed.items():
        rest = len(differences) - _SHOWN
        shown = differences[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        lines += [f"  [{name}] {difference}" for difference in shown]
    return "\n".join(lines)


def _refuse_foreign(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists but was not made by a run (it has no manifest.json); move it away, or "
                        "choose another --workdir")


def _move_aside(directory: Path) -> Path:
    number = 1
    while (aside := directory.with_name(f"{directory.name}.old-{number}")).exists():
        number += 1
    directory.rename(aside)
    return aside


@contextlib.contextmanager
def _lock(workdir: Path) -> Iterator[None]:
    """Keeps a second process out of the work directory. The system drops the lock however this process ends."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the work directory {workdir} cannot be used ({error.strerror or error}); choose another "
                        "--workdir") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(f"the work directory {workdir} is in use by process {file.read().strip() or '?'}; wait for "
                            "it to end, or choose another --workdir") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _use_compile_cache(folder: str | None) -> None:
    """Keeps compiled programs between runs. A folder set through JAX's own environment variable comes first."""
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    import jax  # not at the top: a finished run is told so without loading JAX

    place = folder or "~/.cache/jaxalign"
    if "://" not in place:  # JAX reads and writes buckets by itself.
        place = str(Path(place).expanduser())
        _try_to_write(place)
    jax.config.update("jax_compilation_cache_dir", place)
    # A run starts with tens of small programs: read back they take a third of the time that they take to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A process killed while it wrote an entry leaves it torn; JAX then compiles anew, and would tell so at every run. Of a disk
    # that fills up it would tell for each program.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")


@functools.cache
def _try_to_write(folder: str) -> None:
    """Tells once where nothing can be kept in a folder; there may be something to read."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        why = error.strerror or error
        print(f"config.compile_cache: {folder} cannot be written ({why}); what this run compiles is not kept", flush=True)


def _print_results(config: Config, workdir: Path) -> None:
    summary = workdir / "summary.json"
    if "evaluate" in config.stages and summary.exists():
        print("\n" + table.render(json.loads(summary.read_text(encoding="utf-8")), config.stages))
    report = workdir / "report.html"
    if "report" in config.stages and report.exists():
        print(f"\nReport: {report}")
