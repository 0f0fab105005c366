"""The graph of stages: finds each stage's code and the stages that it reads.

A node of the graph is a stage in a round. Its name is its folder (`jaxalign.config.rounds`): "ppo" or "round-2/ppo".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxalign.config import Config, FeedbackConfig, rounds
from jaxalign.config.sections.feedback import ppo_methods
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
    stage = record.load("stage")
    if not isinstance(stage, Stage):
        raise UserError(f"the stage of record {record.name!r} in config.stages is of type {type(stage).__name__}; an instance "
                        "of a subclass of jaxalign.stages.shared.base.Stage is expected")
    if stage.name != record.name:
        raise UserError(f"the stage of record {record.name!r} in config.stages has the name {stage.name!r}; give both the same "
                        "name")
    return stage


def loader(config: Config) -> Load:
    """A function that finds the stages of `config.stages` and all registered stages by the names of their records."""
    given = {STAGES.get(name, "config.stages").name: name for name in config.stages}
    return lambda name: load_stage(given.get(name, name))


def inputs(config: Config, folder: str, load: Load) -> tuple[str, ...]:
    """The folders that a stage reads.

    In a later round these are the folders of the first round's inputs, with those of the round's own stages in their place, and
    the policy that the round starts from.
    """
    own, start = rounds.inputs_of(config, folder), rounds.start_of(config, folder)
    of_stage = (own.get(name, name) for name in load(rounds.parse(folder)[0]).inputs(config))
    return tuple(dict.fromkeys((*of_stage, *([start] if start else []))))


def read_graph(config: Config, manifests: Callable[[str], Manifest | None], load: Load,
               as_recorded: bool) -> Mapping[str, tuple[str, ...]]:
    """The stages to run and all that they read, mapped to the stages that each reads, in dependency order.

    Args:
      config: the config.
      manifests: returns the manifest in a folder, or None if it was never started.
      load: finds a stage.
      as_recorded: if a stage has a manifest, take the stages that it reads from there instead of loading its code.

    Raises:
      UserError: a stage that another stage reads was never started and is not in `config.stages`.
    """
    planned, graph = rounds.folders(config), {}

    def visit(name: str, reader: str) -> None:
        if name in graph:
            return
        manifest = manifests(name)
        if manifest is None and name not in planned:
            raise UserError(f"stage {rounds.label(reader)} reads stage {rounds.label(name)}, which has not been run in this "
                            f"work directory; add {rounds.parse(name)[0]} to config.stages")
        known = name in planned or rounds.parse(name)[0] in STAGES
        recorded = manifest is not None and (as_recorded or not known)
        sources = tuple(manifest.inputs) if recorded else inputs(config, name, load)
        for source in sources:
            visit(source, name)
        graph[name] = sources

    for name in planned:
        visit(name, "")
    return graph


def unread(config: Config, load: Load) -> list[str]:
    """A sentence for each planned stage whose output is ignored: a later stage trains, but none that is planned reads it; and
    for each setting that no stage reads."""
    planned = rounds.folders(config)
    read = {source for name in planned if name != "report" for source in inputs(config, name, load)}
    trainers = {record.name for record in stages_in_order(config.stages) if record.trains}
    sentences = []
    for index, name in enumerate(planned):
        later = [rounds.label(each) for each in planned[index + 1 :] if rounds.parse(each)[0] in trainers]
        if later and name not in read and rounds.parse(name)[0] in STAGES:
            sentences.append(f"config.stages has {rounds.parse(name)[0]}, but no stage of this run reads the output of stage "
                             f"{rounds.label(name)} ({', '.join(later)} will train without it): remove it, or change the "
                             "stages or options that make the later stages read other data")
    return sentences + _ignored_settings(config)


def _ignored_settings(config: Config) -> list[str]:
    """A sentence for each setting of the judge that no stage asks, and for each file of prompts that no stage reads.

    A custom stage may read any of them.
    """
    records = stages_in_order(config.stages)
    names = {record.name for record in records}
    if not names <= set(STAGES.builtin):
        return []
    given: dict[str, tuple[str, str]] = {}  # The value of each ignored field, and what to do about it.
    if not any(record.asks_judge for record in records) and "evaluate" not in names and not (
            "ppo" in names and ppo_methods(config)):
        remedy = "no stage of this run asks a judge: add revise, compare, online_dpo or evaluate to config.stages"
        given |= {f"feedback.{name}": (value, remedy) for name in ("constitution", "judge", "templates")
                  if (value := getattr(config.feedback, name)) != getattr(FeedbackConfig, name)}
    data, shares = config.data, [getattr(config, name).helpful_share for name in ("compare", "ppo") if name in names]
    evaluates = "evaluate" in names and not data.eval
    if data.source == "prompts_jsonl" and (data.rl or data.train) and "revise" not in names and not evaluates:
        remedy = "the prompts of this run are those of data.rl: add revise to config.stages"
        measured = any(share is not None for share in shares) or ("ppo" in names and config.ppo.alarms.every)
        given |= {f"data.{name}": (value, remedy) for name in ("red_team", "helpful")
                  if (value := getattr(data, name)) and not (name == "helpful" and measured)}
    return [f"config.{name} is {value!r}, which has no effect, since {remedy}, or leave the field at its default"
            for name, (value, remedy) in given.items()]
