"""`config.rounds`: the stages that every round repeats, and the folders of their later rounds in the work directory.

The first round's stages are in WORKDIR/STAGE, those of round k in WORKDIR/round-k/STAGE. Functions take or return such folders
as strings relative to the work directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jaxalign.config.base import WholeConfig
from jaxalign.errors import UserError
from jaxalign.registry.rewards import reward_records
from jaxalign.registry.stages import policies_before, policy_makers, stages_in_order

_FOLDER = re.compile(r"round-(?P<round>[1-9]\d*)")


def folder(stage: str, number: int) -> str:
    """The folder of a stage in round `number`, counted from 1."""
    return stage if number == 1 else f"round-{number}/{stage}"


def parse(place: str) -> tuple[str, int]:
    """(stage, round) of a folder."""
    first, slash, stage = place.rpartition("/")
    match = _FOLDER.fullmatch(first) if slash else None
    return (place, 1) if match is None else (stage, int(match["round"]))


def label(place: str) -> str:
    """The name of a folder for progress lines and tables: "compare", or "compare, round 2"."""
    stage, number = parse(place)
    return stage if number == 1 else f"{stage}, round {number}"


def workdir_of(directory: Path) -> Path:
    """The work directory of a stage's folder."""
    parent = directory.parent
    is_round = _FOLDER.fullmatch(parent.name) and not (parent / "config.json").exists()
    return parent.parent if is_round else parent


def repeated(stages: Iterable[str], reward_source: str) -> tuple[str, ...]:
    """The names of the stages that every round repeats, in order; empty if the run cannot be repeated.

    They begin with the stage that makes comparisons or, without one, the first stage that trains a policy on the answers of a
    judge. They end with the last stage that trains a policy.

    Args:
      stages: names as in `config.stages`.
      reward_source: `config.reward.source`.
    """
    records = stages_in_order(stages)
    first = [i for i, record in enumerate(records) if "comparisons" in record.makes]
    if not first:
        rated = any(record.name == "ppo" for record in records) and any(x.asks_judge for x in reward_records(reward_source))
        judged = [record.asks_judge or (rated and record.name == "ppo") for record in records]
        first = [i for i, record in enumerate(records) if record.makes_policy and judged[i]]
    policies = [i for i, record in enumerate(records) if record.makes_policy]
    if not first or not policies:
        return ()
    return tuple(record.name for record in records[first[0] : policies[-1] + 1])


def repeated_stages(config: WholeConfig) -> tuple[str, ...]:
    """`repeated` of a config."""
    return repeated(config.stages, config.reward.source)


def folders(config: WholeConfig) -> tuple[str, ...]:
    """The folders of all stages and rounds, in the order in which they run."""
    names = [record.name for record in stages_in_order(config.stages)]
    if config.rounds == 1:
        return tuple(names)
    own = repeated_stages(config)
    end = names.index(own[-1]) + 1
    later = [folder(stage, number) for number in range(2, config.rounds + 1) for stage in own]
    return (*names[:end], *later, *names[end:])


def later_policies(config: WholeConfig) -> tuple[str, ...]:
    """The folder of the last policy of each round after the first."""
    return tuple(_last_policy(config, number) for number in range(2, config.rounds + 1))


def start_of(config: WholeConfig, place: str) -> str:
    """The folder of the previous round's last policy, if the stage in `place` starts from it; else "".

    A stage starts from it if it is in a later round and no earlier stage of its own round trains a policy.
    """
    stage, number = parse(place)
    before = policies_before(config.stages, stage)[-1:]
    if number == 1 or set(before) & set(repeated_stages(config)):
        return ""
    return _last_policy(config, number - 1)


def inputs_of(config: WholeConfig, place: str) -> dict[str, str]:
    """The folders of the stages that the stage in `place` reads from its own round, by stage; empty in the first round."""
    number = parse(place)[1]
    return {} if number == 1 else {stage: folder(stage, number) for stage in repeated_stages(config)}


def check(config: WholeConfig) -> None:
    """Raises UserError if `config.rounds` is above 1 and no stage can be repeated."""
    if config.rounds > 1 and not repeated_stages(config):
        raise UserError(f"config.rounds is {config.rounds}, but no stage of this run trains a policy on new labels: add "
                        "compare, with dpo or with preference and ppo, to config.stages, or leave rounds at 1")


def _last_policy(config: WholeConfig, number: int) -> str:
    own = repeated_stages(config)
    return folder([name for name in policy_makers(config.stages) if name in own][-1], number)
