"""Where prompts and comparisons come from."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import DATA_SOURCES, DataSourceRecord, data_source
from jaxalign.registry.stages import STAGES, StageRecord


@dataclasses.dataclass(frozen=True)
class Data(Section):
    """Where prompts and comparisons come from."""

    source: str = field("world", "world (the embedded world), preferences_jsonl (human preferences), judgements_jsonl (single "
                        "judged answers, for dpo.objective=kto), prompts_jsonl (prompts, with the columns that a reward "
                        "reads), arithmetic, or 'package.module:name' or 'FILE.py:name' of your own.")
    train: str = field("", "JSONL file (.gz too), for preferences_jsonl (chosen/rejected), judgements_jsonl "
                       "(prompt/completion/label) and prompts_jsonl.")
    prompt_field: str = field("prompt", "The field of a row that is the prompt, for prompts_jsonl; the others are its columns.")
    extra_train: tuple[str, ...] = field((), "Further such files, mixed with train.")
    weights: tuple[float, ...] = field((), "Shares of an epoch's pairs that come from train and from each of extra_train, in "
                                       "any unit; empty: as many as each file has.")
    held_out_share: float = field(0.05, "Share of the rows kept for evaluation.", between(0.0, 0.9))
    max_bad_share: float = field(0.01, "Share of broken lines over which reading stops.", between(0.0, 1.0))
    empty_answers: str = field("drop", "What becomes of a row one of whose answers is empty.", one_of("drop", "keep"))
    differing_contexts: str = field(
        "drop", "A row whose dialogues differ before the last turn: dropped, or the turns they share are the prompt.",
        one_of("drop", "keep"))
    limit: int = field(0, "Rows of a file used at most; 0 means all.", at_least(0))
    style: str = field("compact", "How dialogues become text: the world's compact markers, the transcripts of HH, or the "
                       "model's own chat template.", one_of("compact", "hh", "chat"))

    def check(self, config: WholeConfig, name: str) -> None:
        source = data_source(config)
        _check_read(self, source)
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


def _check_read(data: Data, source: DataSourceRecord) -> None:
    """Refuses a field that only other sources read."""
    if source.reads is None:
        return
    for entry in dataclasses.fields(data):
        readers = [other.name for other in DATA_SOURCES if other.reads is not None and entry.name in other.reads]
        value = getattr(data, entry.name)
        if readers and entry.name not in source.reads and value != entry.default:
            raise UserError(f"config.data.{entry.name} is {value!r}, which config.data.source {source.name!r} does not read; "
                            f"leave it at {entry.default!r}, or set data.source to one of {', '.join(readers)}")


def _check_stages(names: tuple[str, ...], source: DataSourceRecord) -> None:
    """Refuses a stage that learns from rows of which the source has none."""

    def fed(stage: StageRecord) -> bool:
        return not stage.learns_from or not set(stage.learns_from).isdisjoint(source.provides)

    for name in names:
        if not fed(STAGES.get(name, "config.stages")):
            raise UserError(f"stage {name} has no data to learn from with config.data.source {source.name!r}; set "
                            f"config.stages to some of {', '.join(stage.name for stage in STAGES if fed(stage))}")
