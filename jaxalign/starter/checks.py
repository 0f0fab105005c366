"""The checks of `jaxalign init`, in order: what the model is, memory, judgements and revisions."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxalign.config import Config
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.sources.asked import read_asked
from jaxalign.data.tokenizers.files import thinking_variables
from jaxalign.diagnosis.findings import Finding
from jaxalign.errors import UserError
from jaxalign.feedback.constitution import Constitution
from jaxalign.feedback.critique import is_usable
from jaxalign.models.language_model import load_model
from jaxalign.planner.hardware import Cluster
from jaxalign.reasons import REVISION, advice, listed
from jaxalign.records import Revision
from jaxalign.starter.facts import BASE, KINDS, ModelFacts
from jaxalign.starter.judging import Judged, best, check_judge
from jaxalign.starter.memory import Fit, fit, these_devices
from jaxalign.starter.settings import STORAGES, StarterChoice, WeightStorage, make_config, template_sets
from jaxalign.trainers.judging import Judge, revise

PROMPTS = 8
"""The prompts of a trial of revisions."""
KEPT = ("grown", "cut_off", "critique_refused")
"""The outcomes that `sft.keep` can keep, other than its default."""
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
        remedy = ("a base model often cannot judge: use its instruction-tuned version, as the model or as the judge"
                  if facts.kind == BASE else "use a larger model of the same family, or another judge")
        say(Finding("judge", "problem", f"this model cannot judge: {'; '.join(judge.faults())} ({judge.sentence()}); {remedy}"))
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
    if not judged:
        raise refused
    return judged


class RevisionTrial(NamedTuple):
    """The revisions of a trial."""

    revisions: Sequence[Revision]

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of revisions that are not ordinary, by outcome."""
        found = (one.outcome for one in self.revisions if not is_usable(one.outcome, ("unchanged",)))
        return dict(collections.Counter(found).most_common())

    @property
    def usable(self) -> int:
        return len(self.revisions) - sum(self.outcomes.values())

    @property
    def enough(self) -> bool:
        """Whether at least half of the revisions can be trained on."""
        return 2 * self.usable >= len(self.revisions)

    @property
    def keep(self) -> tuple[str, ...]:
        """Outcomes to keep so that the run can reach its end; empty if there are enough usable revisions."""
        return () if self.enough else tuple(name for name in KEPT if name in self.outcomes)

    def sentence(self) -> str:
        """Says how many revisions can be trained on, and why the others cannot."""
        said = f"{self.usable} of {len(self.revisions)} revisions could be trained on"
        return said + (f"; the others: {listed(self.outcomes, REVISION)}" if self.outcomes else "")

    def remedy(self) -> str:
        """The remedy for the most frequent reason."""
        return advice(self.outcomes)

    def example(self, width: int = 300) -> list[str]:
        """The lines of the first ordinary revision, or of the first one."""
        one = next((one for one in self.revisions if one.outcome is None), self.revisions[0])
        parts = {"prompt": one.prompt.messages[-1].content, "answer": one.response, "critique": one.critique,
                 "revision": one.revision}
        return [f"  {name:<9}{' '.join((text or '').split())[:width]}" for name, text in parts.items()]


def try_revisions(config: Config) -> RevisionTrial:
    """Answers, criticises and revises the first prompts of `data.red_team`, one round.

    Args:
      config: the run's config, whose judge is its own model.
    """
    config = resolve_auto(config)
    section, feedback = config.revise, config.feedback
    policy = load_model(config.model.path, max_length=config.model.max_length, style=config.data.style,
                        compute_dtype=config.model.compute_dtype)
    tokenizer = policy.tokenizer.with_variables(thinking_variables(config.data.thinking))
    policy = dataclasses.replace(policy, tokenizer=tokenizer)
    asked = [item.messages for item in read_asked(config.data.red_team)[:PROMPTS]]
    sampling = {"temperature": section.temperature, "max_new_tokens": section.max_new_tokens, "batch": PROMPTS}
    judge = Judge(policy, Constitution(feedback.constitution), **sampling, templates=feedback.templates,
                  thinking=feedback.thinking, reasoning=bool(feedback.reasoning))
    return RevisionTrial(revise(policy, asked, rounds=1, judge=judge, **sampling))
