"""The report's sections on training: the curves and checks of RL, the losses, time and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from jaxalign.tracking.formatting import number, seconds
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import Curves, Figure, Section, Table, curve_figures
from jaxalign.tracking.report.examples import Tag
from jaxalign.tracking.timing import PhaseTotal
from jaxalign.tracking.workdir import RunFiles

_RL_CURVES = (
    Curves("Score and reward", {"score": "score", "reward": "reward"}),
    Curves("Parts of the score", {"score_preference": "preference", "score_distilled": "distilled",
                                  "score_callable": "callable", "score_verifier": "verifier",
                                  "score_ai_feedback": "ai_feedback", "score_length": "length"}),
    Curves("KL to the reference", {"kl_k1": "k1", "kl_k3": "k3", "kl_full": "full"}),
    Curves("Response length", {"response_length": "tokens"}),
    Curves("Entropy", {"entropy": "nats"}),
    Curves("Clipped share", {"clip_fraction": "policy", "value_clip_fraction": "value"}),
    Curves("Explained variance", {"explained_variance": "explained variance"}),
)
_MORE_RL_CURVES = (
    Curves("Responses that end by themselves", {"eos_rate": "share"}),
    Curves("KL coefficient", {"kl_coef": "coefficient"}),
    Curves("Approximate KL of an update", {"approx_kl": "nats"}),
    Curves("Probability ratio", {"ratio_mean": "mean", "ratio_max": "largest"}),
    Curves("Policy loss", {"policy_loss": "loss"}),
    Curves("Value loss", {"value_loss": "loss"}),
    Curves("Gradient norm", {"grad_norm": "policy", "critic_grad_norm": "critic"}),
    Curves("Sampler's gap to the trainer", {"sampler_gap": "nats"}),
    Curves("Epochs run", {"epochs_run": "epochs"}),
)

_ALGORITHMS = {
    "reinforce": "REINFORCE with a learnt baseline", "reinforce_pp": "REINFORCE++", "rloo": "RLOO", "grpo": "GRPO",
    "remax": "ReMax", "vtrace": "actor-critic with V-trace",
}  # fmt: skip
"""What config.ppo.advantages is called; all else is PPO."""

_DIRECT_CURVES = (
    Curves("Loss", {"loss": "loss"}),
    Curves("Implicit reward", {"chosen_reward": "better answer", "rejected_reward": "worse answer"}),
    Curves("Margin", {"margin": "better less worse"}),
    Curves("Accuracy", {"accuracy": "share of pairs ranked as labelled"}),
    Curves("KL to the reference", {"kl": "nats a response"}),
    Curves("Decided pairs", {"decided": "pairs an iteration"}),
    Curves("Response length", {"length": "tokens"}),
)


def reinforcement(run: RunFiles) -> Section:
    """The curves of PPO and the checks that ran at its first step."""
    title, stage = "Reinforcement learning", run.stage("ppo")
    if not stage.summary and not stage.metrics:
        return Section("rl", title, missing=(run.absence("ppo", "the curves and checks of RL"),))
    rows = [[check["name"], Tag("passed", "good") if check.get("passed") else Tag("failed", "bad"),
             number(check.get("value")), number(check.get("tolerance")), check.get("meaning") or ""]
            for check in stage.summary.get("checks") or []]
    header = ["Check", "Result", "Measured", "Allowed", "What it means"]
    tables = (Table("Checks at step 0: numbers that must be right before any training", header, rows),) if rows else ()
    missing = () if rows else (run.absence("ppo", "the run-time checks"),)
    stopped = stage.summary.get("stopped_early")
    advantages = (run.config.get("ppo") or {}).get("advantages")
    intro = f"{len(stage.metrics):,} iterations of {_ALGORITHMS.get(advantages, 'PPO')}"
    intro += f", {stopped:,} of them ended early by the KL limit." if stopped else "."
    return Section("rl", title, intro, missing, curve_figures(run, "ppo", _RL_CURVES), tables,
                   curve_figures(run, "ppo", _MORE_RL_CURVES))


def direct(run: RunFiles) -> list[Section]:
    """The curves of direct preference optimisation, offline and online; nothing for a run that has neither."""
    sections = []
    for name, title in (("dpo", "Direct preference optimisation"), ("online_dpo", "Online direct preference optimisation")):
        if name not in run.planned:
            continue
        stage = run.stage(name)
        if not stage.summary and not stage.metrics:
            sections.append(Section(name, title, missing=(run.absence(name, "its curves"),)))
            continue
        objective = (run.config.get("dpo") or {}).get("objective")
        intro = f"{len(stage.metrics):,} steps" + (f" of the objective “{objective}”." if objective else ".")
        held_out = stage.summary.get("held_out") or {}
        rows = _held_out(held_out) if held_out else []
        tables = (Table("On answers it never trained on", ["What", "Value"], rows),) if rows else ()
        sections.append(Section(name, title, intro, (), curve_figures(run, name, _DIRECT_CURVES), tables))
    return sections


def _held_out(measured: Mapping[str, Any]) -> list[list[str]]:
    """What was measured on pairs, or on single judged answers."""
    ends = [["Held-out accuracy", number(measured.get("accuracy"))], ["Held-out margin", number(measured.get("margin"))]]
    if "desirable" not in measured:
        return [["Held-out pairs", number(measured.get("pairs"))], *ends]
    kinds = (("Held-out good answers", "desirable"), ("Held-out bad answers", "undesirable"))
    return [*([what, number(measured.get(name))] for what, name in kinds), *ends]


def losses(run: RunFiles) -> Section:
    """The losses of language-model training."""
    figures, missing, rows = [], [], []
    for name, label in (("pretrain", "Pretraining"), ("sft", "Fine-tuning"), ("best_of_n", "Fine-tuning on the best of n")):
        stage = run.stage(name)
        if name == "best_of_n" and name not in run.planned:
            continue
        if not stage.summary and not stage.metrics:
            missing.append(run.absence(name, f"the losses of {label.lower()}"))
            continue
        curves = Curves(f"{label} loss", {"loss": "training", "held_out_loss": "held-out"})
        figures += curve_figures(run, name, [curves])
        fields = ("steps", "tokens", "loss_first", "loss_last", "held_out_loss")
        rows.append([label, *(number(stage.summary.get(field)) for field in fields)])
    header = ["Stage", "Steps", "Tokens", "First loss", "Last loss", "Held-out loss"]
    return Section("losses", "Pretraining and fine-tuning", "", tuple(missing), tuple(figures),
                   (Table("Losses in nats a token", header, rows),) if rows else ())


def costs(run: RunFiles) -> Section:
    """Time and tokens by stage and phase."""
    title = "Time and tokens"
    timed = {name: stage.timing for name, stage in run.stages.items() if stage.timing}
    if not timed:
        return Section("time", title, missing=("No stage has recorded its time yet.",))
    totals = {name: sum(phase["seconds"] for phase in timing.values()) for name, timing in timed.items()}
    rows = [row for name, timing in timed.items() for row in _cost_rows(name, timing)]
    figure = Figure("Time by stage", Markup(plots.time_bars("Time by stage", list(totals.items()))),
                    f"{seconds(sum(totals.values()))} in all.")
    table = Table("Wall-clock time and tokens, over every start of the run. Operations are those that the models need, "
                  "whatever else is computed; the peak is what the devices' vendor says they can do.",
                  ["Stage", "Phase", "Time", "Tokens", "Tokens a second", "TFLOP/s", "Of the peak"], rows)
    first = [[name, seconds(timing["first step"]["since"])] for name, timing in timed.items()
             if timing.get("first step", {}).get("since")]
    waited = (Table("From the last start of a stage to the end of its first step", ["Stage", "Time"], first),) if first else ()
    return Section("time", title, figures=(figure,), tables=(table, *waited))


def _cost_rows(name: str, timing: Mapping[str, PhaseTotal]) -> list[list[str]]:
    """A row for the stage, and one for each phase where it has several."""
    whole = PhaseTotal(
        seconds=sum(phase["seconds"] for phase in timing.values()), tokens=sum(phase["tokens"] for phase in timing.values()),
        flops=0.0, peak=0.0, runs=0, since=0.0,
    )  # fmt: skip
    if len(timing) == 1:
        return [[name, next(iter(timing)), *_cost_cells(next(iter(timing.values())))]]
    return [[name, "all", *_cost_cells(whole)], *([f"{name}:", phase, *_cost_cells(total)] for phase, total in timing.items())]


def _cost_cells(total: PhaseTotal) -> list[str]:
    spent, tokens, rate = total["seconds"], total["tokens"], total["flops"] / max(total["seconds"], 1e-9)
    return [
        seconds(spent), f"{tokens:,}" if tokens else "-", f"{tokens / spent:,.0f}" if tokens and spent > 0 else "-",
        f"{rate / 1e12:.3g}" if rate else "-", f"{rate / total['peak']:.1%}" if rate and total["peak"] else "-",
    ]  # fmt: skip
