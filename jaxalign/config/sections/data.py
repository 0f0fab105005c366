"""Where prompts and comparisons come from."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of, registered
from jaxalign.config.reading import chosen
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import DATA_SOURCES, DataSourceRecord, data_source
from jaxalign.registry.stages import STAGES, StageRecord

_SOURCE = chosen("source", DATA_SOURCES)


@dataclasses.dataclass(frozen=True)
class Data(Section):
    """The origin of prompts and comparisons."""

    source: str = field("world", "world (the embedded world), preferences_jsonl (human preferences), judgements_jsonl (single "
                        "judged answers, for dpo.objective=kto), prompts_jsonl (prompts, with the columns that a reward "
                        "reads), or arithmetic.",
                        registered(DATA_SOURCES))
    train: str = field("", "JSONL file (.gz too), for preferences_jsonl (chosen/rejected), judgements_jsonl "
                       "(prompt/completion/label) and prompts_jsonl.", None, _SOURCE)
    prompt_field: str = field("prompt", "The field of a row that is the prompt; the other fields are its columns.", None,
                              _SOURCE)
    extra_train: tuple[str, ...] = field((), "Further files, mixed with train.", None, _SOURCE)
    weights: tuple[float, ...] = field((), "Shares of an epoch's pairs that come from train and from each file of extra_train, "
                                       "in any unit; empty: in proportion to their sizes.", None, _SOURCE)
    held_out_share: float = field(0.05, "Share of the rows held out for evaluation.", between(0.0, 0.9), _SOURCE)
    max_bad_share: float = field(0.01, "Reading stops where a larger share of lines is malformed.", between(0.0, 1.0), _SOURCE)
    empty_answers: str = field("drop", "Drop or keep a row with an empty answer.", one_of("drop", "keep"),
                               _SOURCE)
    differing_contexts: str = field("drop", "A row whose dialogues differ before the last turn: drop it, or take the turns "
                                    "they share as the prompt.", one_of("drop", "keep"), _SOURCE)
    limit: int = field(0, "Most rows of a file that are used; 0: all.", at_least(0), _SOURCE)
    style: str = field("compact", "How dialogues become text: the world's compact markers, HH's transcripts, or the model's "
                       "own chat template.", one_of("compact", "hh", "chat"))

    def check(self, config: WholeConfig, name: str) -> None:
        source = data_source(config)
        self._check_mixture()
        if source.rows and not self.train:
            raise UserError(f"config.data.source is {self.source!r} but config.data.train is empty; set it to a JSONL file "
                            f"(.gz too) of {source.rows}")
        _check_stages(config.stages, source)
        if source.text is None and config.model.source == "scratch":
            raise UserError(f"config.data.source is {self.source!r}, which has no text to train a tokenizer and a base on; set "
                            "config.model.source to 'huggingface'")
        if self.style == "chat" and config.model.source == "scratch":
            raise UserError("config.data.style is 'chat', the chat template of a pretrained model, but config.model.source is "
                            "'scratch'; set it to 'huggingface', or the style to 'compact'")
        if self.style == "chat" and source.feedback:
            raise UserError(f"config.data.style is 'chat' but config.data.source is {self.source!r}, whose stages use compact "
                            "markers; set data.source to a file, or the style to 'compact'")

    def _check_mixture(self) -> None:
        files = 1 + len(self.extra_train)
        if self.weights and len(self.weights) != files:
            raise UserError(f"config.data.weights has {len(self.weights)} numbers for {files} files (config.data.train and "
                            "config.data.extra_train); give one for each, or none")
        if any(weight <= 0 for weight in self.weights):
            raise UserError(f"config.data.weights is {self.weights}; every weight must be above 0: leave out a file that is "
                            "not to be used")


def _check_stages(names: tuple[str, ...], source: DataSourceRecord) -> None:
    """Refuses a stage that learns from rows of which the source has none."""

    def fed(stage: StageRecord) -> bool:
        return not stage.learns_from or not set(stage.learns_from).isdisjoint(source.provides)

    for name in names:
        if not fed(STAGES.get(name, "config.stages")):
            raise UserError(f"stage {name} has no data to learn from with config.data.source {source.name!r}; set "
                            f"config.stages to some of {', '.join(stage.name for stage in STAGES if fed(stage))}")
