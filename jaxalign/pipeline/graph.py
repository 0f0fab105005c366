"""The graph of stages: finds each stage's code and the stages that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.registry.stages import STAGES, stages_in_order
from jaxalign.stages.shared.base import Stage
from jaxalign.stages.shared.manifest import Manifest

Load = Callable[[str], Stage]
"""Finds a stage by its name."""


def load_stage(name: str) -> Stage:
    """The stage with a registered name, or at "package.module:attribute" or "FILE.py:attribute".

    The stage's module is imported only here, so that a run with nothing to compute does not import JAX.

    Raises:
      UserError: there is no such record, its module cannot be imported, or it does not contain a Stage of that name.
    """
    record = STAGES.get(name, "config.stages")
    found = record.load("stage")
    if not isinstance(found, Stage):
        raise UserError(f"the stage of record {record.name!r} in config.stages is of type {type(found).__name__}; an instance "
                        "of a subclass of jaxalign.stages.shared.base.Stage is expected")
    if found.name != record.name:
        raise UserError(f"the stage of record {record.name!r} in config.stages has the name {found.name!r}; give both the same "
                        "name")
    return found


def loader(config: Config) -> Load:
    """A function that finds the stages of `config.stages` and all registered stages by the names of their records."""
    given = {STAGES.get(name, "config.stages").name: name for name in config.stages}
    return lambda name: load_stage(given.get(name, name))


def names(config: Config) -> tuple[str, ...]:
    """The names of the stages to run, in order."""
    return tuple(record.name for record in stages_in_order(config.stages))


def read_graph(config: Config, manifests: Callable[[str], Manifest | None], load: Load,
               as_recorded: bool) -> Mapping[str, tuple[str, ...]]:
    """The stages to run and all that they read, mapped to the stages that each reads, in dependency order.

    Args:
      config: the config.
      manifests: returns the manifest of a stage by name, or None if it was never started.
      load: finds a stage.
      as_recorded: if a stage has a manifest, take the stages that it reads from there instead of loading its code.

    Raises:
      UserError: a stage that another stage reads was never started and is not in `config.stages`.
    """
    planned, graph = names(config), {}

    def visit(name: str, reader: str) -> None:
        if name in graph:
            return
        manifest = manifests(name)
        if manifest is None and name not in planned:
            raise UserError(f"stage {reader} reads stage {name}, which has not been run in this work directory; "
                            f"add {name} to config.stages")
        known = name in planned or name in STAGES
        recorded = manifest is not None and (as_recorded or not known)
        sources = tuple(manifest.inputs) if recorded else tuple(load(name).inputs(config))
        for source in sources:
            visit(source, name)
        graph[name] = sources

    for name in planned:
        visit(name, "")
    return graph
