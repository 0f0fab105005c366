"""Handles responses that have no score."""

from __future__ import annotations

import dataclasses
import logging

from jaxalign.errors import UserError


@dataclasses.dataclass
class DroppedRows:
    """Warns once about responses without a score, and stops the run if too many in a batch have none.

    Attributes:
      name: the reward's name in messages.
      max_share: the largest share of a batch that may lack a score (`config.reward.max_dropped_share`).
      in_run: whether a stage of a run uses the reward, which messages then tell how to set the share and to run again.
    """

    name: str
    max_share: float
    in_run: bool = True
    _warned: bool = dataclasses.field(default=False, init=False)

    def check(self, dropped: int, rows: int, why: str | None, cause: BaseException | None = None) -> None:
        """Checks the counts of one batch. Raises UserError, from `cause`, if more than the allowed share was dropped."""
        if not dropped:
            return
        sentence = f"{self.name} gave no score for {dropped} of {rows} responses ({why})"
        if dropped > self.max_share * rows:
            if not self.in_run:
                raise UserError(f"{sentence}, more than the allowed share of {self.max_share}; fix the cause") from cause
            raise UserError(f"{sentence}, more than config.reward.max_dropped_share ({self.max_share}) allows; fix the cause "
                            "and run the same command again") from cause
        if not self._warned:
            logging.getLogger("jaxalign").warning(
                "%s; these rows are left out, and the metric 'kept' counts the others", sentence
            )
            self._warned = True
