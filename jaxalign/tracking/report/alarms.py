"""The alarms of RL in the report: sentences about those that fired, and plots of the measures."""

from __future__ import annotations

import dataclasses
import math

from jaxalign.config import AlarmsConfig
from jaxalign.tracking.alarms import Fired, outcome, read_measurements
from jaxalign.tracking.report.blocks import Figure, curve_figure
from jaxalign.tracking.workdir import RunFiles

_PLOTS = (
    ("Held-out helpful prompts: mean score", {"score": "score"}),
    ("Held-out helpful prompts: length", {"length": "tokens"}),
    ("Held-out helpful prompts: shares", {"refused": "refused", "unfinished": "did not end", "repetition": "repeated 4-grams",
                                          "win_rate": "win rate"}),
)


def fired_alarms(run: RunFiles) -> tuple[Fired, ...]:
    """The alarms that fired in stage ppo."""
    measured = read_measurements(run.stage("ppo").metrics)
    fields = {field.name for field in dataclasses.fields(AlarmsConfig)}
    settings = (run.config.get("ppo") or {}).get("alarms") or {}
    section = AlarmsConfig(**{name: value for name, value in settings.items() if name in fields})
    return outcome(section, measured).fired if measured else ()


def alarm_sentences(run: RunFiles) -> list[str]:
    """A sentence for each alarm that fired in stage ppo, and one about the policy that is kept; empty without alarms."""
    measured, fired = read_measurements(run.stage("ppo").metrics), fired_alarms(run)
    if not measured:
        return []
    if not fired:
        return [f"No alarm fired in {len(measured) - 1:,} measurements on held-out helpful prompts."]
    sentences = [alarm.sentence() for alarm in fired]
    action = ((run.config.get("ppo") or {}).get("alarms") or {}).get("action", AlarmsConfig().action)
    kept = (run.stage("ppo").summary.get("alarms") or {}).get("kept")
    if action == "stop":
        sentences.append("The run ended with an error.")
    elif action == "best" and kept is not None:
        sentences.append(f"RL ended, and the policy after iteration {kept:,} is kept.")
    return sentences


def alarm_figures(run: RunFiles) -> tuple[Figure, ...]:
    """Plots of the measures by iteration; iteration 0 is the policy before RL."""
    measured = read_measurements(run.stage("ppo").metrics)
    figures = []
    for title, names in _PLOTS:
        curves = {label: [(one.iteration, one.values.get(name, math.nan)) for one in measured] for name, label in names.items()}
        figures += curve_figure(title, curves, "iteration")
    return tuple(figures)
