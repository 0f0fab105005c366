"""What changed since a stage of RL or of preference optimisation began: the evaluation before and after, and the curves.

The report of a run that goes on also begins with its progress.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxalign.config import rounds
from jaxalign.tracking.differences import MORE, WITHIN, Difference, Estimate
from jaxalign.tracking.drift import METHOD, drift_sentences
from jaxalign.tracking.estimates import MAIN_MEASURES, Compared, EvaluatedModel, compared_measures, win_rate
from jaxalign.tracking.formatting import capitalized, number, percent, seconds
from jaxalign.tracking.measures import model_column, model_phrase
from jaxalign.tracking.report.blocks import FIRST, ReportSection, Table
from jaxalign.tracking.report.roles import joined
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.watching.run import RunStatus
from jaxalign.tracking.workdir import RunFiles, StageFiles

_IMITATES = ("sft",)
"""Stages that make a policy from texts, without preferences or rewards."""
_OPENINGS = {"ppo": "RL", "dpo": "DPO", "online_dpo": "online DPO", "best_of_n": "best-of-n"}
_INTERVALS = ("“More than noise” means that the 95% interval of the difference does not contain 0; with many measures, one of "
              "twenty differs by chance. The intervals do not contain the noise between seeds.")
_EVALUATED = ("For rates, the interval is that of Newcombe (1998, method 10); for means, that of Welch with the normal "
              "quantile. It treats the answers of both models as independent; as both answered the same prompts, it tends to "
              "be too wide.")


@dataclasses.dataclass(frozen=True)
class PolicyStage:
    """A stage that changed a policy: its label, its files, and the models of the evaluation before and after it."""

    label: str
    files: StageFiles
    before: str
    after: str

    @property
    def opening(self) -> str:
        """The name of the method in a sentence: "RL", "RL in round 2"."""
        stage, number = rounds.parse(self.after)
        return _OPENINGS.get(stage, f"stage {stage}") + (f" in round {number}" if number > 1 else "")


def changes(run: RunFiles, running: str = "") -> list[ReportSection]:
    """The changes in each stage of RL and preference optimisation; no section if none can be measured.

    Args:
      run: the files of the run.
      running: the label of a stage whose curves the opening describes; they are left out.
    """
    answers = _answers(run)
    parts, notes = [], []
    for stage in policy_stages(run):
        measures = _measures(run, stage, answers)
        curves = [] if stage.label == running else curve_sentences(run, stage.label)
        sentences = [*_win_sentence(run, stage), *curves]
        if not measures and not sentences:
            continue
        title = f"{capitalized(stage.opening)} (stage {stage.label})"
        parts.append((title, sentences, _table(run, stage, measures) if measures else None))
        notes += [_EVALUATED] * bool(measures) + [METHOD] * bool(curves)
    if not parts:
        return []
    body = render("changes.html.j2", parts=parts, note=" ".join(dict.fromkeys([_INTERVALS, *notes])))
    return [ReportSection("changes", "What changed in training, and whether it is more than noise", body=body, nav="Changes",
                          order=FIRST)]


def change_sentences(run: RunFiles) -> list[str]:
    """For each stage with an evaluation before and after, a sentence on the main measures."""
    answers, sentences = _answers(run), []
    for stage in policy_stages(run):
        measures = {one.name: one for one in _measures(run, stage, answers)}
        main = [measures[name] for name in MAIN_MEASURES if name in measures] or [*measures.values()]
        verdicts = {one.title: one.differences()[1].verdict for one in main}
        clear = [one.change_words(1) for one in main if verdicts[one.title] == MORE]
        rest = [f"“{title}”" for title, verdict in verdicts.items() if verdict == WITHIN]
        clauses = clear + ([f"the differences in {joined(rest)} are within noise" if len(rest) > 1 else
                            f"the difference in {rest[0]} is within noise"] if rest else [])
        if clauses:
            models = " to ".join(model_phrase(model, run.used) for model in (stage.before, stage.after))
            sentences.append(f"Since {stage.opening} began, from {models}: {'; '.join(clauses)}.")
    return sentences


def curve_sentences(run: RunFiles, label: str) -> list[str]:
    """What changed in the metrics of a stage, by its label in `RunFiles.runs`, in one sentence; none with too few steps."""
    files = run.runs.get(label)
    return drift_sentences(label, files.metrics, kl_reference(run, label)) if files else []


def kl_reference(run: RunFiles, label: str) -> str:
    """The model that the KL in the metrics of a stage is measured against, for a sentence or a title."""
    stage = next((stage for stage in policy_stages(run) if stage.label == label), None)
    if stage is None:
        return "the reference"
    moving = (run.config.get(stage.files.name) or {}).get("reference") == "iteration"
    return "the policy at the start of the iteration" if moving else stage.before


def policy_stages(run: RunFiles) -> Iterator[PolicyStage]:
    """The stages of all rounds that changed a policy by preferences or rewards and have started, in order."""
    policies = [record.name for record in run.records if record.makes_policy]
    for name in policies:
        if run.stage(name).started and name not in _IMITATES:
            yield PolicyStage(name, run.stage(name), run.start_of(name), name)
    for index, stages in run.later.items():
        repeated = [name for name in policies if name in stages]
        before = rounds.folder(repeated[-1], index - 1) if repeated else "base"
        for name in repeated:
            after = rounds.folder(name, index)
            if stages[name].started and name not in _IMITATES:
                yield PolicyStage(rounds.label(after), stages[name], before, after)
            before = after


def _answers(run: RunFiles) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of stage evaluate by model."""
    answers: dict[str, list[Mapping[str, Any]]] = {}
    for row in run.rows("evaluate"):
        answers.setdefault(row["model"], []).append(row)
    return answers


def _measures(run: RunFiles, stage: PolicyStage, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Compared]:
    """The measures that are known before and after a stage."""
    if not {stage.before, stage.after} <= set(run.models):
        return []
    models = [EvaluatedModel(run, model, answers.get(model, ())) for model in (stage.before, stage.after)]
    return [one for one in compared_measures(models) if None not in one.estimates]


def _win_sentence(run: RunFiles, stage: PolicyStage) -> list[str]:
    """How often the judge preferred the model after the stage over the one before."""
    found = win_rate(run, stage.after, stage.before)
    if found is None:
        return []
    verdict = Difference(found.value - 0.5, found.low - 0.5, found.high - 0.5).verdict
    return [f"The judge preferred {model_phrase(stage.after, run.used)} over {model_phrase(stage.before, run.used)} in "
            f"{percent(found.value)} of {found.total:,} comparisons (95% interval {percent(found.low)} to "
            f"{percent(found.high)}); the distance from 50% is {verdict}."]


def _table(run: RunFiles, stage: PolicyStage, measures: Sequence[Compared]) -> Table:
    """The measures before and after, with the difference and its verdict."""
    rows = [[one.title, *(_cell(one, estimate) for estimate in one.estimates),
             one.difference_words(one.differences()[1]).replace("), ", ")\n")] for one in measures]
    models = [model_column(model, run.used) for model in (stage.before, stage.after)]
    caption = "The evaluation before and after, with 95% intervals and the number of answers."
    return Table(caption, ["Measure", *models, "Difference"], rows)


def _cell(one: Compared, estimate: Estimate) -> str:
    """An estimate with the number of its answers, and its interval below: "4.5% (9/200)"."""
    value, *interval = one.cell(estimate).split("\n")
    if estimate.total:
        count = "" if estimate.count is None else f"{number(estimate.count)}/"
        value += f" ({count}{estimate.total:,}{'' if count else ' answers'})"
    return "\n".join([value, *interval])


def live_sentences(run: RunFiles, status: RunStatus) -> list[str]:
    """The progress of the stage that runs, and its changes in words; none if `status` has no stage."""
    if not status.stage:
        return []
    return [_progress(status), *curve_sentences(run, status.stage)]


def _progress(status: RunStatus) -> str:
    parts = []
    if status.total:
        parts.append(f"{status.count:,} of {status.total:,} {status.unit}s ({percent(status.count / status.total)})")
    if status.seconds_left is not None:
        parts.append(f"about {seconds(status.seconds_left)} left in this stage")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tokens per second")
    if status.utilisation is not None:
        parts.append(f"{percent(status.utilisation)} of the devices' peak")
    details = f": {', '.join(parts)}" if parts else ""
    return f"Stage {status.stage} runs, {status.finished_stages} of {status.stages} stages are finished{details}."
