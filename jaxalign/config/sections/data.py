"""Where prompts and comparisons come from."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.schema import field
from jaxalign.errors import UserError

STAGES_OF_SOURCE = {
    "arithmetic": ("pretrain", "ppo", "evaluate", "report"),
    "prompts_jsonl": ("ppo", "evaluate", "report"),
    "judgements_jsonl": ("pretrain", "dpo", "evaluate", "report"),
}
"""The stages that a source without preferences can feed; the other sources feed every stage."""


@dataclasses.dataclass(frozen=True)
class Data(Section):
    """Where prompts and comparisons come from."""

    source: str = field("world", "The embedded world; human preferences in JSONL; single judged answers in JSONL, for "
                        "dpo.objective=kto; prompts in JSONL, with the columns that a reward reads; or arithmetic.",
                        one_of("world", "preferences_jsonl", "judgements_jsonl", "prompts_jsonl", "arithmetic"))
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
        self._check_mixture()
        self._check_file()
        allowed = STAGES_OF_SOURCE.get(self.source, config.stages)
        for stage in config.stages:
            if stage not in allowed:
                raise UserError(f"stage {stage} has no data to learn from with config.data.source {self.source!r}; set "
                                f"config.stages to some of {', '.join(allowed)}")
        if self.source == "prompts_jsonl" and config.model.source == "scratch":
            raise UserError("config.data.source is 'prompts_jsonl', which has no text to train a tokenizer and a base on; set "
                            "config.model.source to 'huggingface'")
        if self.style == "chat" and config.model.source == "scratch":
            raise UserError("config.data.style is 'chat', the chat template of a pretrained model, but config.model.source is "
                            "'scratch'; set it to 'huggingface', or the style to 'compact'")
        if self.style == "chat" and self.source == "world":
            raise UserError("config.data.style is 'chat' but config.data.source is 'world', whose stages use compact markers; "
                            "set data.source to a file, or the style to 'compact'")

    def _check_file(self) -> None:
        if not self.source.endswith("_jsonl") or self.train:
            return
        rows = {"preferences_jsonl": 'dialogues, each row with "chosen" and "rejected"',
                "judgements_jsonl": 'judged answers, each row with "prompt", "completion" and "label"',
                "prompts_jsonl": 'prompts, each row with "prompt" and the columns that the reward reads'}[self.source]
        raise UserError(f"config.data.source is {self.source!r} but config.data.train is empty; set it to a JSONL file (.gz "
                        f"too) of {rows}")

    def _check_mixture(self) -> None:
        files = 1 + len(self.extra_train)
        if self.extra_train and self.source != "preferences_jsonl":
            raise UserError(f"config.data.extra_train is {self.extra_train} but config.data.source is {self.source!r}; set it "
                            "to 'preferences_jsonl', or leave extra_train empty")
        if self.weights and self.source != "preferences_jsonl":
            raise UserError(f"config.data.weights is {self.weights} but config.data.source is {self.source!r}; set it to "
                            "'preferences_jsonl', or leave weights empty")
        if self.weights and len(self.weights) != files:
            raise UserError(f"config.data.weights has {len(self.weights)} numbers for {files} files (config.data.train and "
                            "config.data.extra_train); give one for each, or none")
        if any(weight <= 0 for weight in self.weights):
            raise UserError(f"config.data.weights is {self.weights}; every weight must be above 0: leave out a file that is "
                            "not to be used")
