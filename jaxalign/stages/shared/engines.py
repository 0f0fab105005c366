"""Sets up sampling for a stage."""

from __future__ import annotations

from jaxalign.data.chat.styles import stop_ids
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.feedback.text_generator import Counted, TextGenerator
from jaxalign.models.model import Model, Params
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling, section_sampling
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext


def text_generator(
    context: StageContext, model: Model, params: Params, batch: int, counted: Counted | None = None
) -> TextGenerator:
    """A model that answers prompts, `batch` rows at a time. It reports its work to `counted`."""
    engine = Engine(model, batch, context.config.model.max_length)
    return TextGenerator(engine, params, run_models.load_tokenizer(context), counted)


def sampling(section, tokenizer: Tokenizer, style: str = "compact") -> Sampling:
    """The sampling settings of a config section with temperature, top_k, top_p and max_new_tokens.

    Sampling stops at the tokens that end an answer in this style.
    """
    return section_sampling(section, stop_ids(tokenizer, style))
