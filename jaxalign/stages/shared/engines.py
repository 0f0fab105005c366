"""Sets up the sampling of a stage, times its work and shows its progress."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from jaxalign.data.chat.styles import stop_ids
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.feedback.text_generator import Counted, TextGenerator
from jaxalign.models import flops
from jaxalign.models.model import Model, Params
from jaxalign.rollout.sampler import Engine, OnFinished
from jaxalign.rollout.sampling import Sampling, section_sampling
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.tracking.progress import Progress
from jaxalign.tracking.timing import Timeline, Timing
from jaxalign.trainers.inputs import peak_flops


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


def counting(progress: Progress) -> OnFinished:
    """A listener for `sample_rollout` that adds finished responses and their tokens to `progress`."""
    return lambda ended: progress.update(0, sum(len(response.ids) for _, response in ended), len(ended))


def timing(context: StageContext, model: Model) -> Timing:
    """The timer of a stage's phases."""
    return Timing(context.directory / "timing.jsonl", peak_flops(model))


class Meter:
    """Counts the work of `TextGenerator`s that share one model, for a progress bar and for the phases that `phase` times."""

    def __init__(self, timing: Timing | Timeline, model: Model, progress: Progress | None = None):
        self._timing, self._model, self._progress = timing, model, progress
        self._tokens, self._flops = 0, 0.0

    def __call__(
        self, lengths: Sequence[int], tokens: int, heads: int, before: Sequence[int] = (), model: Model | None = None
    ) -> None:
        """Adds the work of one call. Pass the meter to a `TextGenerator` as `counted`. model: by default the meter's own."""
        self._tokens += tokens
        self._flops += flops.forward(model or self._model, lengths, heads, before)
        if self._progress is not None:
            self._progress.update(0, heads, len(lengths))

    def of(self, model: Model) -> Counted:
        """Like the meter itself, for a `TextGenerator` of another model."""
        return functools.partial(self, model=model)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the body of the `with` statement and attributes the work counted in it to the phase."""
        tokens, operations = self._tokens, self._flops
        with self._timing.phase(name) as phase:
            yield
            phase.tokens, phase.flops = self._tokens - tokens, self._flops - operations
