"""The embedded world of `data.source=world`."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between
from jaxalign.config.reading import chosen, when
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import DATA_SOURCES, data_source

_SOURCE = chosen("data.source", DATA_SOURCES, "world")
_SCRATCH = when("model.source", "scratch")
_TOPICS = (_SCRATCH, chosen("data.source", DATA_SOURCES, "world_rows"))  # At least one of the conditions holds.


@dataclasses.dataclass(frozen=True)
class WorldConfig(Section):
    """The embedded world: short dialogues about invented topics, with known ground truth."""

    topics: int = field(60, "Number of topics.", at_least(4), _SOURCE, _TOPICS)
    held_out_topics: int = field(20, "Topics that the pretraining text only states facts about, without dialogues or other "
                                "demonstrations; evaluation uses only these.", at_least(1), _SOURCE, _TOPICS)
    vocab_size: int = field(768, "Vocabulary size of the SentencePiece tokenizer trained on the text.", at_least(300), _SOURCE,
                            _SCRATCH)
    tokens: int = field(1_700_000, "Approximate size of the pretraining text, in tokens.", at_least(10_000), _SOURCE,
                        _SCRATCH)
    ratings: float = field(0.0, "Fraction of the text that demonstrates how to rate answers from 1 to 10; required by "
                           "reward.source=ai_feedback.", between(0.0, 0.5), _SOURCE, _SCRATCH)
    reasoned: float = field(0.85, "Fraction of the demonstrated judgements and ratings that begin with reasoning; the others "
                            "state the verdict at once.", between(0.0, 1.0), _SOURCE, _SCRATCH)
    with_own_model: bool = field(False, "Use the toy prompts of the world with a pretrained model whose tokenizer lacks "
                                 "jaxalign's markers; otherwise such a run is refused, since its data should be your own.",
                                 None, when("data.source", "world"), when("model.source", "huggingface"))

    def check(self, config: WholeConfig, name: str) -> None:
        if data_source(config).feedback and self.held_out_topics >= self.topics:
            raise UserError(f"config.world.held_out_topics is {self.held_out_topics}; it must be below config.world.topics "
                            f"({self.topics}), so that some topics remain for training")
