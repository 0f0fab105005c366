"""The judges of single stages, and the requests that a judge of the user's own fails to answer."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.reading import unless
from jaxalign.config.schema import field

_MODEL = unless("path", (), "to a folder")
_POSITIONS = 4096
_OTHER = "; empty: the judge of feedback.judge."


@dataclasses.dataclass(frozen=True)
class JudgeConfig(Section):
    """The judges of single stages, and the requests that a judge of your own fails to answer; see docs/cai.md."""

    revise: str = field("", f"The judge that critiques and revises in stage revise, as in feedback.judge{_OTHER}")
    compare: str = field("", f"The judge that labels the pairs of stage compare, as in feedback.judge{_OTHER}")
    evaluate: str = field("", f"The judge of the win rates and of the rubrics of stage evaluate, as in feedback.judge{_OTHER}")
    path: tuple[str, ...] = field((), "For the judge 'model': the folder of its language model, in Hugging Face format or a "
                                  "finished stage of a run; several folders are a jury, whose verdicts are averaged.")
    weights: str = field("float32", "Storage format of the weights in judge.path: float32, bfloat16, int8 (one scale per "
                         "output) or nf4 (4 bits per weight).", one_of("float32", "bfloat16", "int8", "nf4"), _MODEL)
    compute_dtype: str = field("float32", "Dtype of activations and matrix products of the models in judge.path.",
                               one_of("float32", "bfloat16"), _MODEL)
    max_length: int = field(0, "Maximum length of a request to a local judge with the judge's text, in tokens; 0: "
                            "model.max_length for the run's own model, and for judge.path its positions, at most 4,096.",
                            at_least(0))
    audit: tuple[str, ...] = field((), "Files of gold pairs for jaxalign.judge_audit, in the formats of preferences; empty: "
                                   "the pairs that come with jaxalign. See docs/labels.md.")
    retries: int = field(2, "How often a call of a judge of your own is repeated after it raised an error or returned a "
                         "number out of range. If it still fails, its requests are asked one by one; 0: never ask again.",
                         at_least(0))
    max_failed_share: float = field(0.05, "Stop with an error if a judge of your own fails to answer a larger fraction of the "
                                    "requests of a call.", between(0.0, 1.0))

    def request_length(self, positions: int | None) -> int:
        """The maximum length of a request to a model of `path` with `positions` positions (None: unlimited), in tokens."""
        return self.max_length or min(positions or _POSITIONS, _POSITIONS)

    def local_length(self, config: WholeConfig) -> int:
        """The maximum length of a request to the run's own model with the judge's text, in tokens."""
        return self.max_length or config.model.max_length
