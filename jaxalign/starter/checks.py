"""The checks of `jaxalign init`, in order: what the model is, memory, judgements and revisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxalign.config import Config
from jaxalign.diagnosis.findings import Finding
from jaxalign.errors import UserError
from jaxalign.planner.hardware import Cluster
from jaxalign.starter.facts import BASE, KINDS, ModelFacts
from jaxalign.starter.judging import Judged, best, check_judge
from jaxalign.starter.memory import Fit, fit, these_devices
from jaxalign.starter.settings import STORAGES, StarterChoice, WeightStorage, make_config, template_sets
from jaxalign.starter.trial import try_revisions

Say = Callable[[Finding], None]


def choose(facts: ModelFacts, folder: Path, load: bool, say: Say) -> StarterChoice:
    """Checks a model and returns the choices for its config.

    Args:
      facts: the model.
      folder: holds the prompts and the constitution.
      load: whether to load the weights, which judgements and revisions need.
      say: gets each finding when it is known.

    Raises:
      UserError: the weights are damaged, or the model cannot be asked.
    """
    say(Finding("model", "ok", f"{facts.family}, {facts.parameters:,} parameters, {facts.positions:,} positions, "
                f"{KINDS[facts.kind]}"))
    if facts.ends is not None:
        say(Finding("template", "ok", f"a question and its answer can be written; an answer ends with {facts.ends}"))
    choice, fits = _storage(facts, folder, say)
    if load and fits:
        return _asked(facts, folder, choice, say)
    reason = "because the weights may not fit into memory" if load else "because of --nocheck"
    say(Finding("judge", "note", f"not checked, {reason}; measure it with jaxalign judge-audit before you trust its labels"))
    return choice


def _storage(facts: ModelFacts, folder: Path, say: Say) -> tuple[StarterChoice, bool]:
    """(the choice with the first storage that fits into memory, or the last one; whether it fits)."""
    cluster = these_devices()
    for storage in STORAGES:
        choice, found = _sharded(facts, folder, storage, cluster)
        if found.fits:
            say(Finding("memory", "ok", f"{found.sentence()}, with {storage.words}"))
            return choice, True
    say(Finding("memory", "problem", f"{found.sentence()}, even with {storage.words}; take a smaller model, or a larger device "
                "(jaxalign plan tells which one suffices)"))
    return choice, False


def _sharded(facts: ModelFacts, folder: Path, storage: WeightStorage, cluster: Cluster) -> tuple[StarterChoice, Fit]:
    """(the choice for all devices of a cluster, or for half of them until they divide the model; its memory)."""
    devices = cluster.devices
    while True:
        choice = StarterChoice(template_sets(facts)[0], storage, devices=devices)
        try:
            return choice, fit(make_config(facts, choice, folder), dataclasses.replace(cluster, shape=(devices,)))
        except UserError:
            if devices == 1:
                raise
            devices //= 2


def _asked(facts: ModelFacts, folder: Path, choice: StarterChoice, say: Say) -> StarterChoice:
    """The choice after the model has judged pairs and revised answers."""
    judge = best(_judged(make_config(facts, choice, folder), template_sets(facts)))
    choice = dataclasses.replace(choice, templates=judge.templates, rehearsal=not judge.able)
    if judge.able:
        say(Finding("judge", "ok", judge.sentence()))
    else:
        advice = ("a base model often cannot judge: use its instruction-tuned version, as the model or as the judge"
                  if facts.kind == BASE else "use a larger model of the same family, or another judge")
        say(Finding("judge", "problem", f"this model cannot judge: {'; '.join(judge.faults())} ({judge.sentence()}); {advice}"))
    trial = try_revisions(make_config(facts, choice, folder))
    say(Finding("revisions", "ok", trial.sentence()) if trial.enough else
        Finding("revisions", "problem", f"{trial.sentence()}; {trial.remedy()}"))
    print("\n".join(["The run trains on such revisions:", *trial.example()]), flush=True)
    return dataclasses.replace(choice, keep=trial.keep)


def _judged(config: Config, sets: Sequence[str]) -> list[Judged]:
    """The audits with each template set, up to the first with which the model can judge.

    Raises:
      UserError: the model cannot be asked in any of these forms.
    """
    judged, refused = [], None
    for templates in sets:
        try:
            judged.append(check_judge(config, templates))
        except UserError as error:
            refused = refused or error
            continue
        if judged[-1].able:
            break
    if refused is not None and not judged:
        raise refused
    return judged
