"""The config that `jaxalign init` writes: the fields that a beginner edits, with values that suit the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import Config, default_config, from_config_dict
from jaxalign.starter.facts import ALWAYS_THINKS, BASE, MARKED, THINKS, ModelFacts
from jaxalign.starter.memory import MOST_DEVICES
from jaxalign.trainers.extent import RL, SMALL, SUPERVISED, usual_rate

STAGES = ("revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
LONGEST = 1024
"""The largest model.max_length in a written config, unless the model's thoughts need more."""


class InFolder(str):
    """The name of a file in the folder of the config."""


class Setting(NamedTuple):
    """One line of the config. field: its dotted name. why: a short comment."""

    field: str
    value: Any
    why: str = ""


class SettingBlock(NamedTuple):
    """Lines under one comment."""

    title: str
    settings: tuple[Setting, ...]


@dataclasses.dataclass(frozen=True)
class WeightStorage:
    """How the weights are trained and kept. words: a description. settings: the lines that select it."""

    words: str
    settings: tuple[Setting, ...] = ()


_ADAPTERS = (Setting("lora.rank", 16, "train adapters instead of all weights"),)
_NARROW = (*_ADAPTERS, Setting("model.compute_dtype", "bfloat16"))
STORAGES = (
    WeightStorage("all weights trained"),
    WeightStorage("adapters of rank 16", _ADAPTERS),
    WeightStorage("adapters of rank 16 on weights in bfloat16", (*_NARROW, Setting("lora.base", "bfloat16"))),
    WeightStorage("adapters of rank 16 on weights in 4 bits", (*_NARROW, Setting("lora.base", "nf4"))),
)
"""In the order in which they are tried until the run fits into memory."""


@dataclasses.dataclass(frozen=True)
class StarterChoice:
    """What the checks decided.

    Attributes:
      templates: `feedback.templates`; "" for the words of the embedded world.
      storage: one of `STORAGES`.
      rehearsal: whether the model cannot judge, so that the limits of labels are lifted for a run that only shows the steps.
      keep: further outcomes in `sft.keep`.
      devices: the devices over which the run is sharded.
    """

    templates: str
    storage: WeightStorage = STORAGES[0]
    rehearsal: bool = False
    keep: tuple[str, ...] = ()
    devices: int = 1


def template_sets(facts: ModelFacts) -> tuple[str, ...]:
    """The template sets in which the model may be able to judge, the likeliest first."""
    return {BASE: ("transcript",), MARKED: ("",)}.get(facts.kind, ("chat", "transcript"))


def lengths(facts: ModelFacts) -> tuple[int, int]:
    """(model.max_length, the maximum length of an answer), in tokens.

    A revision shows the question, the answer and the critique, each about as long as an answer.
    """
    if facts.kind == MARKED:
        return facts.positions, min(60, facts.positions // 5)
    longest = min(facts.positions, 2 * LONGEST if facts.kind == ALWAYS_THINKS else LONGEST)
    return longest, max(8, longest // (4 if facts.kind == ALWAYS_THINKS else 8))


def blocks(facts: ModelFacts, choice: StarterChoice) -> tuple[SettingBlock, ...]:
    """The lines that every judge shares."""
    longest, new = lengths(facts)
    model = [
        Setting("model.source", "huggingface"), Setting("model.path", str(facts.folder)),
        Setting("model.max_length", longest, "tokens of a prompt with its answer, and of a request to the judge"),
    ]
    if facts.kind == THINKS:
        model.append(Setting("data.thinking", "off", "the policy answers without thoughts"))
    return (
        SettingBlock("The model.", (*model, *choice.storage.settings)),
        *([SettingBlock("The devices.", (
            Setting("mesh.fsdp", choice.devices, "shards weights and batches; batches are multiples of it"),
            Setting("sft.batch_rows", MOST_DEVICES),
        ))] if choice.devices > 1 else ()),
        SettingBlock("Your files.", (
            Setting("data.source", "prompts_jsonl"), Setting("data.red_team", InFolder("red_team.jsonl")),
            Setting("data.helpful", InFolder("helpful.jsonl")),
            Setting("feedback.constitution", InFolder("constitution.json")),
        )),
        SettingBlock("How much: raise these numbers with the number of your prompts.", _sizes()),
        SettingBlock("The length of an answer, a critique or a revision, in tokens.", (
            *(Setting(f"{stage}.max_new_tokens", new) for stage in ("revise", "compare", "ppo", "evaluate")),
            Setting("sft.row_length", longest // 2), Setting("preference.max_length", longest // 2),
        )),
        *([SettingBlock("Learning rates for a model of this size.", rates)] if (rates := _rates(facts, choice)) else ()),
    )


def _sizes() -> tuple[Setting, ...]:
    return (
        Setting("revise.red_team_prompts", 32), Setting("revise.helpful_prompts", 16),
        Setting("revise.rounds", 2, "each round criticises and revises once more"), Setting("revise.batch", 16),
        Setting("compare.prompts", 48, "each gives one pair for the preference model"), Setting("compare.batch", 16),
        Setting("preference.members", 1), Setting("preference.batch", 8),
        Setting("ppo.iterations", 4), Setting("ppo.batch", 16), Setting("ppo.prompts", 48),
        Setting("ppo.alarms.every", 2, "report refusals, lengths and repetitions during RL"), Setting("ppo.alarms.prompts", 8),
        Setting("evaluate.prompts", 16), Setting("evaluate.batch", 16), Setting("evaluate.win_rate_prompts", 16),
    )


def _rates(facts: ModelFacts, choice: StarterChoice) -> tuple[Setting, ...]:
    if facts.parameters < SMALL:
        return ()
    fields = {f"{stage}.optimizer": SUPERVISED for stage in ("sft", "preference")}
    fields |= {"ppo.optimizer": RL, "ppo.critic_optimizer": SUPERVISED}
    rates = {field: usual_rate(facts.parameters, bool(choice.storage.settings), each) for field, each in fields.items()}
    return tuple(Setting(f"{field}.learning_rate", float(f"{rate:.0e}")) for field, rate in rates.items())


def own_judge(facts: ModelFacts, choice: StarterChoice) -> SettingBlock:
    """The lines for a model that judges itself."""
    settings = [Setting("feedback.templates", choice.templates)] if choice.templates else []
    if facts.kind == THINKS and choice.templates == "chat":
        settings.append(Setting("feedback.thinking", "off", "critiques and revisions without thoughts"))
    return SettingBlock("The model judges itself.", tuple(settings))


def rehearsal(choice: StarterChoice) -> SettingBlock | None:
    """The lines that take a run without a usable judge, or without usable revisions, to its end; None if none is needed."""
    settings = []
    if choice.rehearsal:
        settings += [
            Setting("feedback.max_outside_mass", 1.0, "verdicts count that are no answer to the question"),
            Setting("feedback.undecided_margin", 0.0, "labels count that prefer neither answer"),
            Setting("feedback.ties", False, "as above"),
            Setting("feedback.consistent", False, "labels count that contradict themselves"),
        ]
    if choice.keep:
        settings.append(Setting("sft.keep", ("unchanged", *choice.keep), "revisions count that are no proper revisions"))
    if "cut_off" in choice.keep:
        settings.append(Setting("ppo.missing_eos", "none", "scores count of responses that do not end"))
    title = "A REHEARSAL: it shows every step, but its results mean nothing. Remove these lines once the judge can judge."
    return SettingBlock(title, tuple(settings)) if settings else None


def make_config(facts: ModelFacts, choice: StarterChoice, folder: Path) -> Config:
    """The checked config, as the file that is written for these arguments gives it without a `JUDGE`.

    Args:
      facts, choice: the model and what the checks decided.
      folder: the folder of the config.
    """
    values = default_config()
    values.stages = STAGES
    for block in (*blocks(facts, choice), own_judge(facts, choice), rehearsal(choice)):
        for setting in block.settings if block else ():
            section, _, name = setting.field.rpartition(".")
            value = str(folder / setting.value) if isinstance(setting.value, InFolder) else setting.value
            part = values
            for step in section.split("."):
                part = part[step]
            part[name] = value
    return from_config_dict(values)


