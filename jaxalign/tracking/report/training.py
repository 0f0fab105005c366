"""The sections of stages that train a policy: losses, direct preference optimisation, and reinforcement learning."""

from __future__ import annotations

from jaxalign.tracking.formatting import accuracy_interval, number
from jaxalign.tracking.report.alarms import alarm_figures, alarm_sentences, without_samples
from jaxalign.tracking.report.blocks import LAST, Curves, ReportSection, Table, curve_figures
from jaxalign.tracking.report.changes import kl_reference
from jaxalign.tracking.report.examples import Tag
from jaxalign.tracking.report.roles import rewards_rl
from jaxalign.tracking.workdir import RunFiles

_NOT_PARTS = ("score_std", "score_changed")
"""Metrics of RL that are no parts of a score although their names begin with "score_" (`jaxalign.rl.metrics`)."""
_RL_CURVES = (
    Curves("Standard deviation of the scores", {"score_std": "standard deviation"}),
    Curves("Response length", {"response_length": "tokens"}),
    Curves("Entropy", {"entropy": "nats"}),
    Curves("Clipped fraction", {"clip_fraction": "policy", "value_clip_fraction": "value"}),
    Curves("Explained variance", {"explained_variance": "explained variance"}),
)
_MORE_RL_CURVES = (
    Curves("Responses that end with a stop token", {"eos_rate": "share"}),
    Curves("Responses whose score was changed for lack of a stop token", {"score_changed": "share"}),
    Curves("KL coefficient", {"kl_coef": "coefficient"}),
    Curves("Approximate KL of an update", {"approx_kl": "nats"}),
    Curves("Probability ratio", {"ratio_mean": "mean", "ratio_max": "largest"}),
    Curves("Policy loss", {"policy_loss": "loss"}),
    Curves("Value loss", {"value_loss": "loss"}),
    Curves("Gradient norm", {"grad_norm": "policy", "critic_grad_norm": "critic"}),
    Curves("Log-probability gap between sampler and trainer", {"sampler_gap": "nats"}),
    Curves("Epochs run", {"epochs_run": "epochs"}),
)

_ALGORITHMS = {
    "reinforce": "REINFORCE with a learned baseline", "reinforce_pp": "REINFORCE++", "rloo": "RLOO", "grpo": "GRPO",
    "remax": "ReMax", "vtrace": "actor-critic with V-trace", "gae": "PPO",
}
"""The algorithm's name by `config.ppo.advantages`."""

_DIRECT_CURVES = (
    Curves("Loss", {"loss": "loss"}),
    Curves("Implicit reward", {"chosen_reward": "better answer", "rejected_reward": "worse answer"}),
    Curves("Margin", {"margin": "better minus worse"}),
    Curves("Accuracy", {"accuracy": "share of pairs ranked as labelled"}),
    Curves("Decided pairs", {"decided": "pairs per iteration"}),
    Curves("Response length", {"length": "tokens"}),
    Curves("Answers that end with a stop token", {"eos_rate": "share"}),
)


def reinforcement(run: RunFiles) -> ReportSection:
    """The curves of RL and the checks that ran at its first step."""
    title, stage = "Reinforcement learning", run.stage("ppo")
    if not stage.summary and not stage.metrics:
        return ReportSection("rl", title, missing=(run.absence("ppo", "the curves and checks of RL"),), nav="RL")
    rows = []
    for check in stage.summary.get("checks") or []:
        # With 2 significant digits: a measurement can be small, as can its tolerance.
        measured, allowed = ("-" if value is None else f"{value:.2g}" for value in (check.get("value"), check.get("tolerance")))
        result = Tag("passed", "good") if check.get("passed") else Tag("failed", "bad")
        rows.append([check["name"], result, measured, allowed, check.get("meaning") or ""])
    header = ["Check", "Result", "Measured", "Allowed", "Meaning"]
    tables = (Table("Checks at step 0, before the first update", header, rows),) if rows else ()
    section = run.config.get("ppo") or {}
    off = not (section.get("checks") or {}).get("step_zero", True)
    skipped = "The checks at step 0 did not run: ppo.checks.step_zero is off."
    missing = () if rows else (skipped if off else run.absence("ppo", "the run-time checks"),)
    stopped = stage.summary.get("stopped_early")
    advantages = section.get("advantages")
    algorithm = "PPO" if advantages is None else _ALGORITHMS.get(advantages, f"RL with advantages “{advantages}”")
    intro = f"{len(stage.metrics):,} iterations of {algorithm}"
    intro += f", {stopped:,} of which the KL limit ended early." if stopped else "."
    intro = " ".join(filter(None, [intro, _scale_sentence(run), *alarm_sentences(run), without_samples(run)]))
    names = dict.fromkeys(name for row in stage.metrics for name in row if name.startswith("score_"))
    parts = Curves("Parts of the score", {name: name.removeprefix("score_") for name in names if name not in _NOT_PARTS})
    score = Curves("Score and reward", {"score": "score", "reward": "reward"})
    kl = Curves(f"KL to {kl_reference(run, 'ppo')}, nats per response", {"kl_k1": "k1", "kl_k3": "k3", "kl_full": "full"})
    figures = (*alarm_figures(run), *curve_figures(run, "ppo", (score, parts, kl, *_RL_CURVES)))
    return ReportSection("rl", title, intro, missing, figures, tables,
                   curve_figures(run, "ppo", _MORE_RL_CURVES), nav="RL")


def _scale_sentence(run: RunFiles) -> str:
    """The scale of the preference model's scores in RL; "" if RL does not use them, or if they were not normalised."""
    shift, scale = (run.stage("preference").summary.get(name) for name in ("shift", "scale"))
    if not rewards_rl(run) or shift is None or scale is None or (shift, scale) == (0, 1):
        return ""
    return (f"Scores of the preference model are shown after normalisation, (score - shift) / scale with a shift of "
            f"{number(shift)} and a scale of {number(scale)}; the evaluation shows them before normalisation.")


def direct(run: RunFiles) -> list[ReportSection]:
    """The curves of direct preference optimisation, for the run's stages dpo and online_dpo."""
    sections = []
    for name, title, nav in (("dpo", "Direct preference optimisation", "DPO"),
                             ("online_dpo", "Online direct preference optimisation", "Online DPO")):
        if not run.has(name):
            continue
        stage = run.stage(name)
        if not stage.summary and not stage.metrics:
            sections.append(ReportSection(name, title, missing=(run.absence(name, "its curves"),), nav=nav))
            continue
        objective = (run.config.get("dpo") or {}).get("objective")
        intro = f"{len(stage.metrics):,} steps" + (f" of the objective “{objective}”." if objective else ".")
        tables = ()
        if held_out := stage.summary.get("held_out"):  # Pairs, or single answers that were judged.
            titles = {"Held-out pairs": "pairs"}
            if "desirable" in held_out:
                titles = {"Held-out good answers": "desirable", "Held-out bad answers": "undesirable"}
            rows = [[quantity, number(held_out.get(field))] for quantity, field in titles.items()]
            rows += [["Held-out accuracy", accuracy_interval(held_out)], ["Held-out margin", number(held_out.get("margin"))]]
            tables = (Table("Results on held-out answers", ["Quantity", "Value"], rows),)
        kl = Curves(f"KL to {kl_reference(run, name)}, nats per response", {"kl": "nats per response"})
        figures = curve_figures(run, name, (*_DIRECT_CURVES, kl))
        sections.append(ReportSection(name, title, intro, (), figures, tables, nav=nav))
    return sections


def losses(run: RunFiles) -> ReportSection:
    """The losses of the run's stages that train on text: pretrain, sft and best_of_n."""
    figures, missing, rows = [], [], []
    for name, label in (("pretrain", "Pretraining"), ("sft", "Fine-tuning"), ("best_of_n", "Fine-tuning on the best of n")):
        stage = run.stage(name)
        if not run.has(name):
            continue
        if not stage.summary and not stage.metrics:
            missing.append(run.absence(name, f"the losses of {label.lower()}"))
            continue
        curves = Curves(f"{label} loss", {"loss": "training", "held_out_loss": "held-out"})
        figures += curve_figures(run, name, [curves])
        fields = ("steps", "tokens", "loss_first", "loss_last", "held_out_loss")
        rows.append([label, *(number(stage.summary.get(field)) for field in fields)])
    header = ["Stage", "Steps", "Tokens", "First loss", "Last loss", "Held-out loss"]
    intro = "The last loss of a stage is the mean of its last 10 steps, or of all if it has fewer." if rows else ""
    return ReportSection("losses", "Pretraining and fine-tuning", intro, tuple(missing), tuple(figures),
                   (Table("Losses in nats per token", header, rows),) if rows else (), nav="Losses", order=LAST)
