"""Reward sources: the records that `config.reward.source` selects from, alone or as a sum joined by "+"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxalign.registry.core import Record, Registry, names_in
from jaxalign.registry.declarations import declared


@dataclasses.dataclass(frozen=True)
class RewardSource(Record):
    """A source of scores and its requirements.

    Attributes:
      name: the name in the config, and in the metric "score_NAME" if the reward is a sum.
      make: `make(inputs: RewardInputs) -> Reward`, or "module:attribute" of such a function. It may also return a plain
        function `(prompts, responses, **columns) -> scores`. `RewardInputs` is in `jaxalign.rewards.base`.
      stages: the stages with output that it reads. They must have run; they are inputs of the stage that uses the reward.
      reads_base: it reads the helpful-only base model.
      asks_judge: it asks the judge of `config.feedback`, under the constitution.
      learnt: it is a reward model that an earlier stage of the run trained. A critic then starts from the preference model.
      is_model: it is a reward model, so `ppo.score_clip` clips its scores.
      host: a function on the host computes its scores: float32 [B] with a mask of kept rows. Programs that take such scores
        can be compiled ahead.
      reads: the fields of `config.reward` that only some sources read. A field that no selected source reads must keep its
        default.
      needs: requirements on the data source: "comparisons" (to train a preference model on), "answers" (to compare responses
        with) or "feedback" (text from which the base model learns to judge).
      files: `files(config) -> dict[Path, str]`, the user's files that it reads, with the config fields that name them; or
        "module:attribute" of such a function; None: it reads no files.
      programs: `programs(run: jaxalign.planner.programs.Run) -> list[Program]`, the programs that compute its scores outside
        the scoring program; or "module:attribute" of such a function; None: it runs no program on the devices.
    """

    name: str
    make: Callable | str
    stages: tuple[str, ...] = ()
    reads_base: bool = False
    asks_judge: bool = False
    learnt: bool = False
    is_model: bool = False
    host: bool = False
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    files: Callable | str | None = None
    programs: Callable | str | None = None

    _where = "{part} of reward source {name!r}"


REWARDS = Registry("reward source", RewardSource, lambda: declared(RewardSource, ("jaxalign.stages.shared.rewards",)))


def reward_records(source: str) -> tuple[RewardSource, ...]:
    """The records of a sum such as "preference+callable", in the same order.

    Raises:
      UserError: a part is not a reward source.
    """
    return tuple(REWARDS.get(name, "config.reward.source") for name in names_in(source))
