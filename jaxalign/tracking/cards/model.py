"""The card of a model that a stage trained: README.md of a folder that `jaxalign.convert` wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign import __version__
from jaxalign.tracking.cards.facts import RunFacts, StageFacts, base_facts, evaluated, hash_rows, judge_facts
from jaxalign.tracking.cards.markdown import front_matter, section, table
from jaxalign.tracking.formatting import number, percent, percent_interval

_LICENCE = re.compile(r"^license:[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*$", re.MULTILINE)
_CLASSES = {"policy": "AutoModelForCausalLM", "reward": "AutoModelForSequenceClassification"}


def model_card(
    run: RunFacts, folder: str, kind: str, *, base: Path | None = None, notes: Sequence[str] = (), adapters: bool = False
) -> str:
    """The text of README.md for the model of a stage.

    Args:
      run: the run.
      folder: the stage's folder, relative to the work directory.
      kind: "policy" or "reward".
      base: the folder of the pretrained base model; None if the run trained its base.
      notes: sentences on what was exported.
      adapters: whether the folder has only adapters, in PEFT format.
    """
    stage = run.stage(folder)
    reads = run.reads(stage)
    licence = base_licence(base) if base else None
    facts = [("Stage", folder), *base_facts(stage), ("Licence of the base model", licence or "not stated in its folder")]
    facts = [fact for fact in facts if base or fact[0] != "Licence of the base model"]
    lines = [
        *front_matter({
            "library_name": "peft" if adapters else "transformers", "license": licence,
            "pipeline_tag": "text-generation" if kind == "policy" else "text-classification",
            "tags": ["jaxalign", "rlaif", "constitutional-ai"],
        }),
        f"# {'Policy' if kind == 'policy' else 'Reward model'} of stage {folder} of the run {run.name}", "",
        f"A run of jaxalign trained the model; jaxalign {__version__} exported it and wrote this card from the run's manifests "
        "and summaries.", "",
        *section("How it was made", table(("fact", "value"), [*facts, *judge_facts(reads)]), [f"- {note}." for note in notes]),
        *section("Results", _results(run, stage, kind)),
        *section("How to load it", _loading(kind, adapters)),
        *section("Hashes", table(("of", "hash of its", "hash"), hash_rows(reads))),
        *section("Limits", [f"- {limit}" for limit in _limits(run, stage, kind, reads)]),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def base_licence(folder: Path) -> str | None:
    """The licence in the front matter of a model folder's README.md; None if it states none."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    block = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    stated = _LICENCE.search(block[1]) if block else None
    return stated[1] if stated else None


def _results(run: RunFacts, stage: StageFacts, kind: str) -> list[str]:
    header = ("measure", "value", "95% interval", "of")
    if kind == "reward":
        rows = [_rate("accuracy on held-out pairs", stage.summary.get("held_out"), "accuracy", "pairs"),
                _rate("agreement with the preference model", stage.summary.get("agreement"), "rate", "pairs")]
        return table(header, [row for row in rows if row])
    results, model = evaluated(run, stage.folder), stage.folder
    rates = (results.get("rates") or {}).get(model, {})
    rows = [_rate(f"rate of {name}", rate, "rate", "total") for name, rate in rates.items()]
    rows += [_rate(f"win rate against {win['against']}", win, "rate", "total")
             for win in results.get("win_rates") or () if win.get("model") == model]
    rows += [(f"{name} per answer", number(results[field][model]), "-", "-")
             for field, name in (("kl", "KL divergence in nats"), ("length", "tokens")) if model in (results.get(field) or {})]
    if stage.summary.get("held_out_loss") is not None:
        rows.append(("loss on held-out answers", number(stage.summary["held_out_loss"]), "-", "-"))
    return table(header, [row for row in rows if row])


def _rate(name: str, measured: Mapping[str, Any] | None, field: str, total: str) -> tuple[Any, ...] | None:
    if not measured or measured.get(field) is None or measured.get("low") is None:
        return None
    return name, percent(measured[field]), f"{percent_interval(measured)}%", measured.get(total, "-")


def _loading(kind: str, adapters: bool) -> list[str]:
    if adapters:
        cls = "AutoPeftModelForCausalLM" if kind == "policy" else "AutoPeftModelForSequenceClassification"
        return ["With `peft`:", "", "    import peft", f'    model = peft.{cls}.from_pretrained("FOLDER")', "",
                "With jaxalign, for a run that starts from these adapters:", "",
                "    python -m jaxalign.train --config.model.path=BASE --config.lora.path=FOLDER ..."]
    ours = ["    import jaxalign as ja", '    sampler = ja.Sampler(ja.load_model("FOLDER"))'] if kind == "policy" else [
        "    python -m jaxalign.train --config.reward.source=model --config.reward.model=FOLDER ..."]
    return ["With `transformers`:", "", "    import transformers",
            f'    model = transformers.{_CLASSES[kind]}.from_pretrained("FOLDER")',
            '    tokenizer = transformers.AutoTokenizer.from_pretrained("FOLDER")', "", "With jaxalign:", "", *ours]


def _limits(run: RunFacts, stage: StageFacts, kind: str, reads: Sequence[StageFacts]) -> list[str]:
    limits = []
    if any(made.value("feedback.constitution") is not None for made in reads):
        limits.append("The model learned from the judgements of a model, not of persons.")
        limits.append("The run has an audit of the judge on pairs of known quality (`judge_audit.json`)." if run.audited() else
                      "The run has no audit of the judge on pairs of known quality.")
    if stage.value("data.source") == "world":
        limits.append("The run used the embedded world of jaxalign, an artificial language; the model knows nothing else.")
    if kind == "policy" and not evaluated(run, stage.folder):
        limits.append("The run has not evaluated this model.")
    if kind == "reward":
        limits.append("Its accuracy is the agreement with the labels of held-out pairs, not with persons.")
    if any(made.value("feedback.invert") for made in reads):
        limits.append("The labels of the run are inverted (`feedback.invert`).")
    return limits
