"""The card of an exported data set: README.md with the configs that `datasets.load_dataset` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxalign import __version__
from jaxalign.reasons import COMPARISON, REVISION
from jaxalign.tracking.cards.facts import RunFacts, StageFacts, base_facts, hash_rows, judge_facts
from jaxalign.tracking.cards.markdown import front_matter, section, table

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M"))
_LARGER = "10M<n<100M"


@dataclasses.dataclass(frozen=True)
class SetFacts:
    """What the card states of one set.

    Attributes:
      name: its name, which is the name of its config.
      stage: the folder of the stage that made its rows.
      purpose: what it is for, as a sentence without a full stop.
      splits: (the name, the file relative to the card, the number of rows) of each split.
      columns: (the name, the features as `datasets` states them, the meaning) of each column.
      left_out: (the reason, the number of rows) of rows that the set does not contain.
    """

    name: str
    stage: str
    purpose: str
    splits: tuple[tuple[str, str, int], ...]
    columns: tuple[tuple[str, dict[str, Any], str], ...]
    left_out: tuple[tuple[str, int], ...] = ()


def dataset_card(run: RunFacts, sets: Sequence[SetFacts]) -> str:
    """The text of README.md."""
    stages = {stage.folder: stage for made in sets for stage in run.reads(run.stage(made.stage))}
    makers = [run.stage(made.stage) for made in {made.stage: made for made in sets}.values()]
    total = sum(count for made in sets for _, _, count in made.splits)
    lines = [
        *front_matter(_fields(sets, total)),
        f"# Data of the run {run.name}", "",
        f"The data comes from a run of jaxalign; jaxalign {__version__} exported it and wrote this card from the run's "
        "manifests and summaries.", "",
        *section("Sets", table(("set", "split", "rows", "file"), [
            (made.name, *(split, count, file)) for made in sets for split, file, count in made.splits])),
    ]
    lines += ["Load a set with the library `datasets`:", "", "    import datasets",
              f'    datasets.load_dataset("FOLDER", "{sets[0].name}")', ""]
    for made in sets:
        lines += [f"### {made.name}", "", f"{made.purpose}.", "",
                  *table(("column", "content"), [(name, meaning) for name, _, meaning in made.columns])]
    principles = [(stage.folder, name, count["pairs"] if isinstance(count, dict) else count)
                  for stage in makers for name, count in (stage.summary.get("principles") or {}).items()]
    lines += section("How it was made", table(("fact", "value"), [*base_facts(makers[0]), *judge_facts(makers)]),
                     table(("stage", "principle", "rows under it"), principles))
    lines += section("Rows left out", table(("set", "reason", "rows"), [
        (made.name, explained(reason), count) for made in sets for reason, count in made.left_out if count]))
    lines += section("Hashes", table(("of", "hash of its", "hash"), hash_rows(list(stages.values()))))
    lines += section("Limits", [f"- {limit}" for limit in _limits(run, makers)])
    return "\n".join(lines).rstrip("\n") + "\n"


def _fields(sets: Sequence[SetFacts], total: int) -> dict[str, Any]:
    return {
        "tags": ["jaxalign", "rlaif", "constitutional-ai"],
        "size_categories": [next((name for most, name in _SIZES if total < most), _LARGER)],
        "configs": [{"config_name": made.name, "data_files": [{"split": split, "path": file} for split, file, _ in made.splits]}
                    for made in sets],
        "dataset_info": [{"config_name": made.name, "features": [{"name": name} | kind for name, kind, _ in made.columns]}
                         for made in sets],
    }


def explained(reason: str) -> str:
    """The name of a reason with its explanation, if there is one."""
    known = COMPARISON.get(reason) or REVISION.get(reason)
    return f"{reason}: {known}" if known else reason


def _limits(run: RunFacts, makers: Sequence[StageFacts]) -> list[str]:
    limits = ["A model wrote the answers, and a judge, not a person, criticised, revised or labelled them."]
    if makers[0].value("data.source") == "world":
        limits.append("The prompts come from the embedded world of jaxalign, an artificial language of small documents.")
    for stage in makers:
        if stage.value("feedback.invert"):
            limits.append("The labels are inverted (`feedback.invert`): the answer that the judge prefers is the rejected one.")
        agreement = stage.summary.get("order_agreement")
        if agreement is not None:
            limits.append(f"The judge gave the same verdict in both orders of the answers on {agreement:.1%} of the verdicts.")
    if any("pairs" in stage.summary for stage in makers):
        limits.append("The run has an audit of the judge on pairs of known quality (`judge_audit.json`)." if run.audited() else
                      "The run has no audit of the judge on pairs of known quality.")
    if (run.config.get("rounds") or 1) > 1:
        limits.append(f"The data is that of the first of {run.config['rounds']} rounds.")
    return limits
