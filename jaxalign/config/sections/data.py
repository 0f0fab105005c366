"""The sources of prompts and comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of, registered
from jaxalign.config.reading import chosen, unless
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import DATA_SOURCES, PROMPT_FILES, DataSourceRecord, data_source
from jaxalign.registry.stages import STAGES, StageRecord, made_before, stages_in_order

_SOURCE = chosen("source", DATA_SOURCES)
_PAIRS = (_SOURCE, unless("preference.human", (), "to a preference file"))  # Stage preference reads both with these options.


def parse_columns(entries: Sequence[str]) -> dict[str, str]:
    """The column of each field in entries of the form "field=column".

    Raises:
      UserError: an entry has another form, or two entries name one field.
    """
    fields: dict[str, str] = {}
    for entry in entries:
        field, equals, column = entry.partition("=")
        if not (field.strip() and equals and column.strip()):
            raise UserError(f"config.data.columns has {entry!r}; \"field=column\" is expected, such as prompt=question")
        if field.strip() in fields:
            raise UserError(f"config.data.columns names the field {field.strip()!r} twice; name each field once")
        fields[field.strip()] = column.strip()
    return fields


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """The source of prompts and comparisons."""

    source: str = field("world", "The data source: world (the embedded world), preferences_jsonl (human preferences), "
                        "judgements_jsonl (single judged answers, for dpo.objective=kto), messages_jsonl (answered dialogues, "
                        "for stage sft), prompts_jsonl (prompts, with columns for the reward) or arithmetic.",
                        registered(DATA_SOURCES))
    train: str = field("", "JSONL file, optionally .gz, for preferences_jsonl (chosen/rejected), judgements_jsonl "
                       "(prompt/completion/label), messages_jsonl (messages) and prompts_jsonl (the same as "
                       "rl). Each field that names a file also takes a Parquet or Arrow file, a folder of such files, a saved "
                       "folder of the library datasets, or tfds:NAME[/CONFIG][:SPLIT].", None, _SOURCE)
    columns: tuple[str, ...] = field((), "Columns whose names differ from those of the fields that the source reads, each as "
                                     "field=column, such as prompt=question.", None, _SOURCE)
    red_team: str = field("", "File of prompts whose answers stage revise critiques and revises: .jsonl, .json, .csv, or .txt "
                          "with one prompt per line, optionally .gz; see docs/data_formats.md.", None, _SOURCE)
    helpful: str = field("", "File of prompts that stage revise answers without a critique; empty: none.", None, _SOURCE)
    rl: str = field("", "File of prompts for compare and reinforcement learning; empty: those of red_team and helpful.", None,
                    _SOURCE)
    eval: str = field("", "File of prompts for evaluation, which are never trained on; empty: hold out held_out_share of the "
                      "distinct dialogues of red_team and helpful, or of rl.", None, _SOURCE)
    prompt_field: str = field("prompt", "The field of a row, or column of a .csv file, that contains the prompt; the other "
                              "fields are columns.", None, _SOURCE)
    extra_train: tuple[str, ...] = field((), "Additional files, mixed with train.", None, _SOURCE)
    weights: tuple[float, ...] = field((), "Relative shares of train and of each extra_train file in an epoch; empty: "
                                       "proportional to their sizes.", None, _SOURCE)
    held_out_share: float = field(0.05, "Fraction of the rows held out for evaluation.", between(0.0, 0.9), _SOURCE)
    min_held_out: int = field(8, "Minimum number of dialogues that a split of the rows of files, the pairs of stage compare or "
                              "the answers of stage revise holds out; at most a fifth is held out to reach it, and nothing if "
                              "the split's held-out share is 0.", at_least(0))
    max_bad_share: float = field(0.01, "Stop with an error if a larger fraction of lines is malformed.", between(0.0, 1.0),
                                 _PAIRS)
    empty_answers: str = field("drop", "Drop or keep rows with an empty answer.", one_of("drop", "keep"),
                               _PAIRS)
    differing_contexts: str = field("drop", "If the dialogues of a row differ before the last turn: drop the row, or keep "
                                    "it with their common turns as the prompt.", one_of("drop", "keep"), _PAIRS)
    limit: int = field(0, "Maximum number of rows used from a file; 0: all.", at_least(0), _PAIRS)
    window: int = field(0, "Read and encode the rows in windows of at most this number of rows, for data that does not fit in "
                        "memory: stages sft, preference and dpo begin after the first window, and read the next one while "
                        "they train; stages that read prompts use those of one window of each file; 0: read all rows before "
                        "the first step.", at_least(0), _SOURCE)
    style: str = field("auto", "Text format of dialogues: compact (the embedded world's markers), hh (transcripts as in "
                       "HH-RLHF), chat (the model's own chat template), plain (a single text that the answer continues, for "
                       "base models) or auto: compact for model.source=scratch; for a "
                       "pretrained model chat if it has a chat template, compact if its tokenizer has jaxalign's "
                       "markers, else hh; for a stage of a run the style of that run.",
                       one_of("auto", "compact", "hh", "chat", "plain"))
    thinking: str = field("auto", "Whether the policy, if it is a reasoning model such as Qwen3, thinks before it answers: on "
                          "or off sets the variable enable_thinking of the chat template for every prompt; auto: the "
                          "template's default, or for a stage of a run the setting of that run.", one_of("auto", "on", "off"))

    def check(self, config: WholeConfig, name: str) -> None:
        source = data_source(config)
        parse_columns(self.columns)
        self._check_mixture()
        self._check_window(config)
        self._check_files(source, config.stages)
        _check_stages(config.stages, source)
        if source.text is None and config.model.source == "scratch":
            raise UserError(f"config.data.source is {self.source!r}, which has no text to train a tokenizer and a base model "
                            "on; set config.model.source to 'huggingface'")
        if self.style in ("chat", "plain") and config.model.source == "scratch":
            raise UserError(f"config.data.style is {self.style!r}, which is for pretrained models, but config.model.source is "
                            "'scratch'; set it to 'huggingface', or the style to 'auto'")

    def _check_files(self, source: DataSourceRecord, stages: tuple[str, ...]) -> None:
        """Checks that the files which the source and the stages need are set."""
        given = [name for name in ("train", *PROMPT_FILES) if getattr(self, name)]
        if source.prompts is None and source.rows and not self.train:
            raise UserError(f"config.data.source is {self.source!r} but config.data.train is empty; set it to a JSONL file "
                            f"(optionally .gz) of {source.rows}")
        if "revise" in stages and source.reads is not None and "red_team" not in source.reads and not source.feedback:
            raise UserError(f"stage revise needs red-team prompts, which config.data.source {self.source!r} does not have: set "
                            "config.data.source to 'prompts_jsonl' and config.data.red_team to a file, or remove revise from "
                            "config.stages")
        if source.prompts is None or not source.rows:
            return
        if not set(given) - {"eval"}:
            raise UserError(f"config.data.source is {self.source!r} but config.data.red_team, helpful, rl and train are empty; "
                            f"set one to a file of {source.rows}")
        if self.train and self.rl:
            raise UserError("config.data.train and config.data.rl are both set; they are two names of one setting, so set only "
                            "one of them")
        if "revise" in stages and not self.red_team:
            raise UserError("stage revise needs prompts, but config.data.red_team is empty; set it to a file of prompts, or "
                            "remove revise from config.stages")

    def _check_mixture(self) -> None:
        files = 1 + len(self.extra_train)
        if self.weights and len(self.weights) != files:
            raise UserError(f"config.data.weights has {len(self.weights)} numbers for {files} files (config.data.train and "
                            "config.data.extra_train); give one for each, or none")
        if any(weight <= 0 for weight in self.weights):
            raise UserError(f"config.data.weights is {self.weights}; every weight must be above 0: to leave a file out, remove "
                            "it")

    def _check_window(self, config: WholeConfig) -> None:
        """Checks that all that a run reads can be read in windows."""
        if not self.window:
            return
        where, source = f"config.data.window is {self.window}", data_source(config)
        if not source.windows and "window" not in (source.reads or ()):
            raise UserError(f"{where}, but config.data.source {self.source!r} does not read rows in windows; set window to 0")
        if self.extra_train:
            raise UserError(f"{where}, but config.data.extra_train is set; put all files into one folder for "
                            "config.data.train, or set window to 0")
        if self.limit:
            raise UserError(f"{where}, but config.data.limit is {self.limit}; set one of them to 0")
        for record in stages_in_order(config.stages):
            if not record.windows and not set(record.learns_from) <= {"text"}:
                supported = ", ".join(stage.name for stage in STAGES if stage.windows)
                raise UserError(f"{where}, but stage {record.name} reads all rows before it begins; leave it out of "
                                f"config.stages (only {supported} can read rows in windows), or set window to 0 and "
                                "config.data.limit to a number of rows")


def _check_stages(names: tuple[str, ...], source: DataSourceRecord) -> None:
    """Raises UserError if a stage needs rows that neither the source nor another stage of the run provides."""

    def fed(stage: StageRecord) -> bool:
        kinds = made_before(names, stage.name).union(source.provides)
        return not stage.learns_from or not set(stage.learns_from).isdisjoint(kinds)

    for record in stages_in_order(names):
        if not fed(record):
            makers = [stage.name for stage in STAGES
                      if stage.name in record.after and not set(stage.makes).isdisjoint(record.learns_from)]
            hint = f"add {' or '.join(makers)} to config.stages, or " if makers else ""
            raise UserError(f"stage {record.name} has no data to learn from with config.data.source {source.name!r}; {hint}set "
                            f"config.stages to some of {', '.join(stage.name for stage in STAGES if fed(stage))}")
