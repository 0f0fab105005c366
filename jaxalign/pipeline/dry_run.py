"""Checks a run and prints which stages it would run, without running or writing anything."""

from __future__ import annotations

import os

from jaxalign.config import Config, rounds
from jaxalign.config.arguments import as_path
from jaxalign.config.root import require_config
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.pipeline.changes import with_style
from jaxalign.pipeline.graph import Load, inputs, loader, unread
from jaxalign.pipeline.running import check_changes
from jaxalign.registry.stages import stages_in_order
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.manifest import DONE, find_manifest
from jaxalign.storage import LocalStorage


def dry_run(config: Config, workdir: str | os.PathLike, overwrite: bool = False, load: Load | None = None) -> None:
    """Prints what `run` would do with the same arguments: each stage, whether it is done, and the stages that it reads.

    Checks all that `run` checks before its first stage. If a stage would run, also checks that the machine has the devices of
    config.mesh, that the mesh divides the policy's architecture, and that the first row of each stage whose inputs are complete
    can be encoded. Does not check whether another process uses the work directory.

    Args:
      config: the whole config.
      workdir: the work directory; it need not exist.
      overwrite: whether the run may redo stages that changed.
      load: finds a stage by its name; by default `load_stage`.

    Raises:
      UserError: `run` would raise it before or at the start of its first stage.
    """
    require_config(config, "dry_run(config)")
    storage = LocalStorage(as_path(workdir, "dry_run(workdir)"))
    folder = storage.path()
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "cannot be written" if existing.is_dir() else "is not a folder"
        raise UserError(f"the work directory {folder} cannot be used ({existing} {reason}); choose another --workdir")
    config = with_style(config, storage)
    load = loader(config) if load is None else load
    changed = check_changes(config, storage, overwrite, load).stages
    lines, done = [], set()
    for name in rounds.folders(config):
        manifest = None if name in changed else find_manifest(storage, name)
        if manifest is not None and manifest.status == DONE:
            done.add(name)
        action = "done" if name in done else "would start" if manifest is None else "would continue"
        if name in changed:
            action += f" again (the old folder would become {name}.old-N)"
        sources = inputs(config, name, load) if manifest is None else manifest.inputs
        read = f"; reads {'; '.join(map(rounds.label, sources))}" if sources else ""
        lines.append(f"[{rounds.label(name)}] {action}{read}")
    pending = [name for name in rounds.folders(config) if name not in done]
    lines.append(f"{len(pending)} of {len(lines)} stages would run in {folder}; nothing was run or written")
    if "evaluate" in pending and config.evaluate.lm_eval:
        from jaxalign.stages.shared.harness import check_harness

        check_harness(config)
    if pending:
        lines = [f"warning: {sentence}" for sentence in (*unread(config, load), *_check_model(config))] + lines
        _check_rows(config, storage, pending, load)
    if hosts.is_first():
        print("\n".join(lines), flush=True)


def _check_model(config: Config) -> list[str]:
    """Checks the mesh and the placements. Returns sentences on learning rates that are too high for the model."""
    # Imported here, with JAX, so that a mistake in the arguments is reported at once.
    from jaxalign.planner.estimate import check_divides
    from jaxalign.planner.shapes import policy_model
    from jaxalign.stages.shared.placements import check_placements
    from jaxalign.stages.shared.run_models import sharding
    from jaxalign.trainers.extent import RL, SUPERVISED, rate_warning

    policy = policy_model(config, sharding(config.mesh))
    check_divides(policy, config.mesh)
    check_placements(config, config.stages)
    sentences = []
    for record in stages_in_order(config.stages):
        optimizer = getattr(getattr(config, record.name, None), "optimizer", None)
        if record.name != "pretrain" and (said := rate_warning(optimizer, policy, RL if record.name == "ppo" else SUPERVISED)):
            sentences.append(f"[{record.name}] {said}")
    return sentences


def _check_rows(config: Config, storage: LocalStorage, pending: list[str], load: Load) -> None:
    """Encodes the first row of each built-in stage that reads no stage that would run."""
    from jaxalign.stages.shared import preview, reads

    for record in stages_in_order(config.stages):
        name = record.name
        if name in pending and record.preview is not None:
            needed = {*reads.base_stages(config), *inputs(config, name, load)}
            if needed.isdisjoint(pending):
                preview.rows(StageContext(config, storage.path(), storage.path(name), False), name, 1)
