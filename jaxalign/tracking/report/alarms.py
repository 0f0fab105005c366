"""The alarms of RL in the report: sentences about those that fired, and plots of the measures."""

from __future__ import annotations

import dataclasses
import math

from markupsafe import Markup

from jaxalign.config import Alarms
from jaxalign.tracking.alarms import Measurement, outcome, read_measurements
from jaxalign.tracking.formatting import span
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import Figure
from jaxalign.tracking.report.plots import Series
from jaxalign.tracking.workdir import RunFiles

_PLOTS = (
    ("Held-out helpful prompts: mean score", {"score": "score"}),
    ("Held-out helpful prompts: length", {"length": "tokens"}),
    ("Held-out helpful prompts: shares", {"refused": "refused", "unfinished": "did not end", "repetition": "repeated 4-grams",
                                          "win_rate": "win rate"}),
)


def alarm_sentences(run: RunFiles) -> list[str]:
    """A sentence for each alarm that fired in stage ppo, and one about the policy that is kept; empty without alarms."""
    measured, section = read_measurements(run.stage("ppo").metrics), _section(run)
    if not measured:
        return []
    fired = outcome(section, measured).fired
    if not fired:
        return [f"No alarm fired in {len(measured) - 1:,} measurements on held-out helpful prompts."]
    kept = (run.stage("ppo").summary.get("alarms") or {}).get("kept")
    ended = {"stop": "The run ended with an error.", "best": "" if kept is None else
             f"RL ended, and the policy after iteration {kept:,} is kept."}
    return [*(one.sentence() for one in fired), *filter(None, [ended.get(section.action, "")])]


def alarm_warnings(run: RunFiles) -> list[str]:
    """A warning for each alarm that fired, for the opening of the report."""
    measured = read_measurements(run.stage("ppo").metrics)
    fired = outcome(_section(run), measured).fired if measured else ()
    return [f"Warning: an alarm of stage ppo fired. {one.sentence()}" for one in fired]


def _section(run: RunFiles) -> Alarms:
    fields = {field.name for field in dataclasses.fields(Alarms)}
    settings = (run.config.get("ppo") or {}).get("alarms") or {}
    return Alarms(**{name: value for name, value in settings.items() if name in fields})


def alarm_figures(run: RunFiles) -> tuple[Figure, ...]:
    """Plots of the measures by iteration; iteration 0 is the policy before RL."""
    measured = read_measurements(run.stage("ppo").metrics)
    figures = []
    for title, names in _PLOTS:
        series = [_series(measured, name, label) for name, label in names.items()]
        shown = [one for one in series if one.ys]
        if shown:
            several = len(shown) > 1
            note = "; ".join(f"{one.name + ' ' if several else ''}{' → '.join(span([one.ys[0], one.ys[-1]]))}" for one in shown)
            legend = tuple(one.name for one in shown) if several else ()
            figures.append(Figure(title, Markup(plots.line_chart(title, shown, "iteration")), note, legend))
    return tuple(figures)


def _series(measured: list[Measurement], name: str, label: str) -> Series:
    points = [(one.iteration, one.values[name]) for one in measured if math.isfinite(one.values.get(name, math.nan))]
    return Series(label, [x for x, _ in points], [y for _, y in points])
