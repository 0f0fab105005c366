"""The report's sections that are made of numbers: each is a title, an opening sentence, plots and tables.

A section whose stage is missing or unfinished still stands, with one sentence that says why it is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from jaxalign.tracking import plots
from jaxalign.tracking.examples import Tag
from jaxalign.tracking.measures import measure, model_title, ordered_measures, percent
from jaxalign.tracking.plots import Interval, Series
from jaxalign.tracking.progress import format_number, format_seconds
from jaxalign.tracking.prose import NO_GOLD
from jaxalign.tracking.workdir import RunFiles


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its caption; `legend` names the curves where there are several."""

    title: str
    svg: Markup
    note: str = ""
    legend: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first cell of a row is its name. A cell may be a `Tag` to be coloured."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Tag]]


@dataclasses.dataclass(frozen=True)
class Section:
    """One section of numbers; `missing` says in a sentence what is not there and why, `extra` is folded away."""

    id: str
    title: str
    intro: str = ""
    missing: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    extra: tuple[Figure, ...] = ()


def behaviour(run: RunFiles) -> Section:
    """The gold rates by stage with their intervals, then KL, length and score."""
    title, evaluation = "How the models behave", run.evaluation
    if not evaluation:
        return Section("behaviour", title, missing=(run.absence("evaluate", "the rates by stage"),))
    models, rates = list(evaluation.get("models") or []), evaluation.get("rates") or {}
    figures, rows = [], []
    for name in ordered_measures(rates):
        found = [(tone, model, (rates.get(model) or {}).get(name) or {}) for tone, model in enumerate(models)]
        bars = [Interval(model_title(model, run.planned), rate["rate"], rate["low"], rate["high"],
                         f"{rate['count']:,} of {rate['total']:,}", tone) for tone, model, rate in found if rate.get("total")]
        if bars:
            figures.append(Figure(measure(name).title, Markup(plots.interval_bars(measure(name).title, bars)), _side(name)))
        rows.append([measure(name).title, *(_rate_cell(rate) for _, _, rate in found)])
    for field, label in (("kl", "KL (nats a response)"), ("length", "Length (tokens)"),
                         ("preference_score", "Preference score")):
        values = evaluation.get(field) or {}
        if any(values.get(model) is not None for model in models):
            rows.append([label, *(_number(values.get(model)) for model in models)])
    header = ["Measure", *(model_title(model, run.planned) for model in models)]
    caption = "Rates with 95% Wilson intervals; KL is against the model that RL started from"
    prompts = sum((evaluation.get("prompts") or {}).values())
    intro = f"Each model answered the same {prompts:,} prompts. " if prompts else ""
    if figures:
        intro += "A bar is a rate; its whisker is the 95% interval."
    return Section("behaviour", title, intro, () if figures else (NO_GOLD,), tuple(figures),
                   (Table(caption, header, rows),) if rows else ())


def win_rates(run: RunFiles) -> Section:
    """How often the labeller preferred one model's answers over another's."""
    title = "Which answers the labeller prefers"
    found = [row for row in run.evaluation.get("win_rates") or [] if row.get("total")]
    if not found:
        return Section("wins", title, missing=(run.absence("evaluate", "win rates"),))
    bars = [Interval(f"{model_title(row['model'], run.planned)} over {model_title(row['against'], run.planned)}",
                     row["rate"], row["low"], row["high"], f"{_count(row['wins'])} of {row['total']:,}", 1) for row in found]
    undecided = "; ".join(f"{_count(row.get('undecided'))} undecided" for row in found)
    figure = Figure("Win rates", Markup(plots.interval_bars("Win rates", bars, reference=0.5)),
                    f"The dashed line is a draw. {undecided}.")
    return Section("wins", title, "Both orders of each pair were shown to the labeller.", figures=(figure,))


def labels(run: RunFiles) -> Section:
    """What the labeller's preferences look like: confidence, position bias, agreement of the two orders."""
    title, summary = "The AI labels", run.stage("compare").summary
    if not summary:
        return Section("labels", title, missing=(run.absence("compare", "the labels"),))
    figures = []
    shape = summary.get("confidence_histogram") or {}
    if shape.get("counts"):
        name = "Confidence of the labels"
        figures.append(Figure(name, Markup(plots.histogram(name, shape["edges"], shape["counts"], "P(A preferred)")),
                              "0 and 1 are certain; around 0.5 the labeller could not tell."))
    pairs = summary.get("pairs")
    bias = summary.get("position_bias")
    rows = [["Pairs", _count(pairs)],
            ["Identical answers", _share(summary.get("identical_pairs"), pairs)],
            ["Undecided", _share(summary.get("undecided"), pairs)],
            ["Unreadable judgements", _share(summary.get("unparsable"), pairs)],
            ["Same verdict in both orders", "-" if summary.get("order_agreement") is None else percent(summary["order_agreement"])],
            ["Position bias", "-" if bias is None else f"{100 * bias:+.1f} points towards the answer shown first"]]
    tables = [Table("The labels in numbers", ["", "Value"], rows)]
    principles = summary.get("principles") or {}
    if principles:
        tables.append(Table("By principle", ["Principle", "Pairs", "Mean confidence"],
                            [[name, _count(row.get("pairs")), _number(row.get("mean_confidence"))]
                             for name, row in principles.items()]))
    return Section("labels", title, "Two answers to each prompt, judged under a principle with either one shown first.",
                   figures=tuple(figures), tables=tuple(tables))


def preference(run: RunFiles) -> Section:
    """Whether the preference model can be trusted: held-out accuracy, and its probabilities against the outcomes."""
    title, summary = "The preference model", run.stage("preference").summary
    if not summary:
        return Section("preference", title, missing=(run.absence("preference", "the preference model's calibration"),))
    figures, held_out, shape = [], summary.get("held_out") or {}, summary.get("calibration") or {}
    if any(shape.get("count") or []):
        note = f"Expected calibration error {_number(held_out.get('ece'))}. " if held_out.get("ece") is not None else ""
        drawn = plots.calibration("Calibration", shape["edges"], shape["confidence"], shape["accuracy"], shape["count"])
        figures.append(Figure("Calibration", Markup(drawn), note + "The dashed line is perfect; larger dots hold more pairs."))
    figures += _curves(run, "preference", (("Loss", ("loss", "held_out_loss")), ("Accuracy", ("accuracy",))))
    rows = []
    if held_out:
        rows = [["Held-out pairs", _count(held_out.get("pairs"))], ["Held-out accuracy", _accuracy(held_out)],
                ["Expected calibration error", _number(held_out.get("ece"))], ["Held-out loss", _number(held_out.get("loss"))]]
    for field, label in (("reward_mean_before", "Mean reward before centring"), ("reward_std_before", "Its standard deviation"),
                         ("shift", "Shift applied"), ("scale", "Scale applied")):
        if summary.get(field) is not None:
            rows.append([label, _number(summary[field])])
    return Section("preference", title, "It turns the labels into the reward of RL; these pairs it never trained on.",
                   figures=tuple(figures), tables=(Table("The preference model in numbers", ["", "Value"], rows),))


RL_CURVES = (("Score and reward", ("score", "reward")), ("KL to the reference", ("kl_k1", "kl_k3")),
             ("Response length", ("response_length",)), ("Entropy", ("entropy",)),
             ("Clipped share", ("clip_fraction", "value_clip_fraction")), ("Explained variance", ("explained_variance",)))
RL_EXTRA = (("Responses that end by themselves", ("eos_rate",)), ("KL coefficient", ("kl_coef",)),
            ("Approximate KL of an update", ("approx_kl",)), ("Policy loss", ("policy_loss",)), ("Value loss", ("value_loss",)),
            ("Probability ratio", ("ratio_mean", "ratio_max")), ("Gradient norm", ("grad_norm", "critic_grad_norm")),
            ("Sampler's gap to the trainer", ("sampler_gap",)), ("Epochs run", ("epochs_run",)))


def reinforcement(run: RunFiles) -> Section:
    """The curves of PPO and the checks that ran at its first step."""
    title, stage = "Reinforcement learning", run.stage("ppo")
    if not stage.summary and not stage.metrics:
        return Section("rl", title, missing=(run.absence("ppo", "the curves and checks of RL"),))
    checks = stage.summary.get("checks") or []
    rows = [[check["name"], Tag("passed", "good") if check.get("passed") else Tag("failed", "bad"),
             _number(check.get("value")), _number(check.get("tolerance")), check.get("meaning") or ""] for check in checks]
    header = ["Check", "Result", "Measured", "Allowed", "What it means"]
    tables = (Table("Checks at step 0: numbers that must be right before any training", header, rows),) if rows else ()
    missing = () if rows else (run.absence("ppo", "the run-time checks"),)
    stopped = stage.summary.get("stopped_early")
    intro = f"{len(stage.metrics):,} iterations of PPO"
    intro += f", {stopped:,} of them ended early by the KL limit." if stopped else "."
    return Section("rl", title, intro, missing, tuple(_curves(run, "ppo", RL_CURVES)), tables,
                   tuple(_curves(run, "ppo", RL_EXTRA)))


def losses(run: RunFiles) -> Section:
    """The losses of language-model training."""
    figures, missing, rows = [], [], []
    for name, label in (("pretrain", "Pretraining"), ("sft", "Fine-tuning")):
        stage = run.stage(name)
        if not stage.summary and not stage.metrics:
            missing.append(run.absence(name, f"the losses of {label.lower()}"))
            continue
        figures += _curves(run, name, ((f"{label} loss", ("loss", "held_out_loss")),))
        summary = stage.summary
        rows.append([label, _count(summary.get("steps")), _count(summary.get("tokens")), _number(summary.get("loss_first")),
                     _number(summary.get("loss_last")), _number(summary.get("held_out_loss"))])
    header = ["Stage", "Steps", "Tokens", "First loss", "Last loss", "Held-out loss"]
    caption = "Losses in nats a token"
    return Section("losses", "Pretraining and fine-tuning", "", tuple(missing), tuple(figures),
                   (Table(caption, header, rows),) if rows else ())


def costs(run: RunFiles) -> Section:
    """Time and tokens by stage and phase."""
    title = "Time and tokens"
    timed = {name: stage.timing for name, stage in run.stages.items() if stage.timing}
    if not timed:
        return Section("time", title, missing=("No stage has recorded its time yet.",))
    totals = {name: sum(phase["seconds"] for phase in timing.values()) for name, timing in timed.items()}
    rows = []
    for name, timing in timed.items():
        tokens = sum(phase["tokens"] for phase in timing.values())
        rows.append([name, "all", format_seconds(totals[name]), _tokens(tokens), _rate(tokens, totals[name])])
        rows += [["", phase, format_seconds(total["seconds"]), _tokens(total["tokens"]), _rate(total["tokens"], total["seconds"])]
                 for phase, total in timing.items() if len(timing) > 1]
    everything = sum(totals.values())
    figure = Figure("Time by stage", Markup(plots.time_bars("Time by stage", list(totals.items()))),
                    f"{format_seconds(everything)} in all.")
    table = Table("Wall-clock time and tokens, over every start of the run",
                  ["Stage", "Phase", "Time", "Tokens", "Tokens a second"], rows)
    return Section("time", title, figures=(figure,), tables=(table,))


def _curves(run: RunFiles, stage: str, plan: Sequence[tuple[str, Sequence[str]]]) -> list[Figure]:
    figures = []
    for title, names in plan:
        series = [Series(name, *run.stage(stage).column(name)) for name in names]
        drawn = plots.line_chart(title, series)
        if drawn:
            shown = [one for one in series if one.ys]
            note = "; ".join(f"{_prefix(one, shown)}{format_number(one.ys[0])} → {format_number(one.ys[-1])}" for one in shown)
            figures.append(Figure(title, Markup(drawn), note, tuple(one.name for one in shown) if len(shown) > 1 else ()))
    return figures


def _prefix(one: Series, shown: Sequence[Series]) -> str:
    return f"{one.name} " if len(shown) > 1 else ""


def _side(name: str) -> str:
    about = measure(name)
    side = {True: "More is better", False: "Less is better"}.get(about.good, "")
    return ": ".join(part for part in (side, about.meaning) if part)


def _rate_cell(rate: Mapping[str, Any]) -> str:
    if not rate.get("total"):
        return "-"
    return (f"{percent(rate['rate'])} ({rate['count']:,}/{rate['total']:,}), "
            f"{100 * rate['low']:.1f} to {100 * rate['high']:.1f}")


def _accuracy(held_out: Mapping[str, Any]) -> str:
    if held_out.get("accuracy") is None:
        return "-"
    interval = ""
    if held_out.get("low") is not None and held_out.get("high") is not None:
        interval = f" (95% interval {percent(held_out['low'])} to {percent(held_out['high'])})"
    return percent(held_out["accuracy"]) + interval


def _number(value: Any) -> str:
    return "-" if value is None else format_number(value)


def _count(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if tokens and seconds > 0 else "-"


def _share(count: int | None, total: int | None) -> str:
    return f"{count:,} ({percent(count / total)})" if count is not None and total else _count(count)
