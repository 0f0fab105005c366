"""Direct preference objectives: the records that `config.dpo.objective` selects from, alone or as a sum joined by "+"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxalign.errors import UserError
from jaxalign.registry.core import Record, Registry, names_in
from jaxalign.registry.declarations import declared


@dataclasses.dataclass(frozen=True)
class Objective(Record):
    """A direct preference objective and its requirements.

    Attributes:
      name: its name in the config.
      function: `function(inputs: DirectInputs) -> loss` or `-> (loss, PreferenceStats)`, pure and traceable, loss float32 [B];
        or "module:attribute" of such a function, imported on first use. `jaxalign.steps.objectives` documents
        `DirectInputs`. If it returns no statistics, the implicit rewards beta (log pi - log ref) are reported.
      pairs: it trains on pairs of answers. If False, it trains on single judged answers, and the second answer of each row
        belongs to another prompt.
      anchor: `anchor(inputs: DirectInputs) -> float32 []`, computed over the whole batch before the split into micro-batches
        and passed to the function as `inputs.anchor`; or "module:attribute" of such a function; or None.
      sorts_the_batch: it compares the pairs of a batch with each other, so the batch cannot be split into micro-batches.
      summable: it may be a term of a sum.
      needs_reference: it is undefined without a reference, so `dpo.reference` must not be "none".
      mean_rewards: its implicit reward is a mean over tokens, and the held-out accuracy compares means.
      smoothing_required: it needs `dpo.label_smoothing` above 0.
      sft_weight: the value of `dpo.sft_weight` if that is None.
      reads: the fields of `config.dpo` that it reads, among those that not every objective reads. Other such fields must keep
        their defaults.
      dpo_kind: it is a kind of `jaxalign.algorithms.direct_preference.dpo`, and `function` is the kind's formula. Only for
        objectives of the package.
    """

    name: str
    function: Callable | str
    pairs: bool = True
    anchor: Callable | str | None = None
    sorts_the_batch: bool = False
    summable: bool = True
    needs_reference: bool = False
    mean_rewards: bool = False
    smoothing_required: bool = False
    sft_weight: float = 0.0
    reads: tuple[str, ...] = ("label_smoothing",)
    dpo_kind: bool = False

    _where = "the {part} of objective {name!r}"

    def __post_init__(self) -> None:
        self._require_reads()

    def load(self, part: str = "function") -> Callable | None:
        """The function in the field "function" or "anchor", imported if it is named; None stays None.

        Raises:
          UserError: it cannot be imported, or is not a function.
        """
        function = super().load(part)
        if function is not None and not callable(function):
            raise UserError(f"the {part} of objective {self.name!r} is of type {type(function).__name__}; a function is "
                            "expected")
        return function


OBJECTIVES = Registry("objective", Objective, lambda: declared(Objective, (
    "jaxalign.algorithms.direct_preference", "jaxalign.steps.objectives",
)))


def is_custom(names: str) -> bool:
    """Whether an objective, or a term of a sum, is not built in."""
    return any(name not in OBJECTIVES.builtin for name in names_in(names))


def objectives_of(names: str) -> tuple[Objective, ...]:
    """The records of an objective or of the terms of a sum such as "sigmoid+bco_pair". Raises UserError like `Registry.get`."""
    return tuple(OBJECTIVES.get(name, "config.dpo.objective") for name in names_in(names))
