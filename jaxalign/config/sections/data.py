"""The sources of prompts and comparisons."""

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
    """The source of prompts and comparisons."""

    source: str = field("world", "The data source: world (the embedded world), preferences_jsonl (human preferences), "
                        "judgements_jsonl (single judged answers, for dpo.objective=kto), prompts_jsonl (prompts, with columns "
                        "for the reward) or arithmetic.",
                        registered(DATA_SOURCES))
    train: str = field("", "JSONL file, optionally .gz, for preferences_jsonl (chosen/rejected), judgements_jsonl "
                       "(prompt/completion/label) and prompts_jsonl.", None, _SOURCE)
    prompt_field: str = field("prompt", "The field of a row that contains the prompt; the other fields are columns.", None,
                              _SOURCE)
    extra_train: tuple[str, ...] = field((), "Additional files, mixed with train.", None, _SOURCE)
    weights: tuple[float, ...] = field((), "Relative shares of train and of each extra_train file in an epoch; empty: "
                                       "proportional to their sizes.", None, _SOURCE)
    held_out_share: float = field(0.05, "Fraction of the rows held out for evaluation.", between(0.0, 0.9), _SOURCE)
    max_bad_share: float = field(0.01, "Stop with an error if a larger fraction of lines is malformed.", between(0.0, 1.0),
                                 _SOURCE)
    empty_answers: str = field("drop", "Drop or keep rows with an empty answer.", one_of("drop", "keep"),
                               _SOURCE)
    differing_contexts: str = field("drop", "If the dialogues of a row differ before the last turn: drop the row, or keep "
                                    "it with their common turns as the prompt.", one_of("drop", "keep"), _SOURCE)
    limit: int = field(0, "Maximum number of rows used from a file; 0: all.", at_least(0), _SOURCE)
    style: str = field("compact", "Text format of dialogues: compact (the embedded world's markers), hh (transcripts as in "
                       "HH-RLHF) or chat (the model's own chat template).", one_of("compact", "hh", "chat"))

    def check(self, config: WholeConfig, name: str) -> None:
        source = data_source(config)
        self._check_mixture()
        if source.rows and not self.train:
            raise UserError(f"config.data.source is {self.source!r} but config.data.train is empty; set it to a JSONL file "
                            f"(optionally .gz) of {source.rows}")
        _check_stages(config.stages, source)
        if source.text is None and config.model.source == "scratch":
            raise UserError(f"config.data.source is {self.source!r}, which has no text to train a tokenizer and a base model "
                            "on; set config.model.source to 'huggingface'")
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
            raise UserError(f"config.data.weights is {self.weights}; every weight must be above 0: to leave a file out, remove "
                            "it")


def _check_stages(names: tuple[str, ...], source: DataSourceRecord) -> None:
    """Raises UserError if a stage needs rows that the source does not provide."""

    def fed(stage: StageRecord) -> bool:
        return not stage.learns_from or not set(stage.learns_from).isdisjoint(source.provides)

    for name in names:
        if not fed(STAGES.get(name, "config.stages")):
            raise UserError(f"stage {name} has no data to learn from with config.data.source {source.name!r}; set "
                            f"config.stages to some of {', '.join(stage.name for stage in STAGES if fed(stage))}")
