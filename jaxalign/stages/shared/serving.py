"""A language model that answers: from a Hugging Face folder, an Orbax folder, or a stage's folder of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxalign.config import POLICY_STAGES, Mesh
from jaxalign.data.chat.dialogues import cut_front
from jaxalign.data.chat.formats import USER
from jaxalign.data.chat.styles import encode_prompt
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import make_sharding
from jaxalign.records import Message
from jaxalign.rollout.engine import Engine, Response
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import common
from jaxalign.stages.shared.base import StageContext, read_manifest
from jaxalign.stages.shared.conversion import finished_stage, is_model, own_dtype
from jaxalign.training.checkpoint import load_params

STYLES = ("plain", "chat", "hh", "compact")
_UNBOUNDED = 1 << 20  # Positions of a model whose config names no limit.
_MAKERS = ("pretrain", *POLICY_STAGES)


class Loaded(NamedTuple):
    """A language model with its weights and tokenizer, how its run writes dialogues (None: no run is known), and the positions
    it was made for (None: not said)."""

    model: Model
    params: Params
    tokenizer: Tokenizer
    style: str | None
    positions: int | None


def load(folder: Path, mesh: Mesh, dtype: str | None = None, compute_dtype: str | None = None) -> Loaded:
    """The language model in `folder`, on that mesh.

    Args:
      folder: in Hugging Face layout, in Orbax's as `convert` writes it, or a stage's of a run.
      dtype: of the parameters; None for the files' own (float32 for a stage).
      compute_dtype: of activations; None for the run's, and float32 elsewhere.

    Raises:
      UserError: it is none of these or damaged, holds a reward model, or the mesh does not fit.
    """
    if not folder.is_dir():
        raise UserError(f"--model={folder} is not a folder; give a model's folder, or a stage's folder of a run")
    orbax = (folder / "params").is_dir()
    if not is_model(folder) and (orbax or read_manifest(folder) is not None):
        return _load_stage(folder, mesh, dtype, compute_dtype)
    # A folder in Orbax's layout has its tables as they are; others are padded to what the mesh splits them into.
    config = huggingface.read_config(folder, compute_dtype or "float32", 1 if orbax else mesh.tensor)
    if config.head != "lm":
        raise UserError(f"{folder} holds a {config.family.classifier}, which scores texts; a language model is expected")
    model = Model(config.decoder, "lm", make_sharding(mesh))
    huggingface.check_mesh(model)
    tokenizer = load_tokenizer(folder)
    huggingface.check_vocabulary(folder, config, tokenizer)
    dtype = dtype or own_dtype(config.raw)
    params = load_params(folder / "params", model, dtype) if orbax else huggingface.load_params(folder, model, dtype)
    return Loaded(model, params, tokenizer, None, config.max_positions)


def _load_stage(folder: Path, mesh: Mesh, dtype: str | None, compute_dtype: str | None) -> Loaded:
    name, stage, weights, config = finished_stage(folder)
    if name not in _MAKERS:
        raise UserError(f"{folder} is of the stage {name}, which makes no language model; give one of {', '.join(_MAKERS)}")
    settings = config.model if compute_dtype is None else dataclasses.replace(config.model, compute_dtype=compute_dtype)
    config = dataclasses.replace(config, model=settings, mesh=mesh)
    context = StageContext(config, stage.parent, stage, False)
    tokenizer = common.load_tokenizer(context)
    model = common.make_model(config, tokenizer.vocab_size)
    model = model.base if name == "pretrain" else model
    huggingface.check_mesh(model)
    params = common.with_base(context, model, load_params(weights / "params", model))
    if dtype not in (None, "float32"):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    found = huggingface.read_config(settings.path).max_positions if settings.source == "huggingface" else settings.max_length
    return Loaded(model, params, tokenizer, config.data.style, found)


def choose_style(loaded: Loaded, asked: str | None) -> str:
    """The style asked for, else the run's, else "chat" where there is a template, else "plain" (text that goes on).

    Raises:
      UserError: the tokenizer cannot write that style.
    """
    template = loaded.tokenizer.files.chat_template
    style = asked or loaded.style or ("plain" if template is None else "chat")
    if style == "chat" and template is None:
        raise UserError("the model's folder has no chat template; give --style=plain, hh or compact, or put "
                        "chat_template.jinja there")
    if style == "compact":
        try:
            loaded.tokenizer.marker_id(USER)
        except UserError:
            raise UserError(f"the tokenizer has no symbol {USER!r}, which --style=compact needs; it is for models that were "
                            "trained from scratch here") from None
    return style


@dataclasses.dataclass(frozen=True)
class Answerer:
    """Encodes what is asked and decodes what is answered.

    style: one of STYLES; sampling: with the ids that end an answer in that style; batch: answers made at once.
    """

    loaded: Loaded
    style: str
    sampling: Sampling
    batch: int

    @property
    def room(self) -> int:
        """Tokens that a prompt may have."""
        return (self.loaded.positions or _UNBOUNDED) - self.sampling.max_new_tokens

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a dialogue; style "plain": of the one text there is, which the model goes on with."""
        tokenizer = self.loaded.tokenizer
        if self.style == "plain":
            return list(tokenizer.begin_ids) + tokenizer.encode(messages[-1].content)
        return encode_prompt(tokenizer, messages, self.style)

    def fitting(self, messages: Sequence[Message]) -> tuple[Message, ...] | None:
        """The dialogue without the oldest turns that leave no room for an answer; a system message stays. None: even its last
        turn leaves none."""
        kept = 1 if messages[0].role == "system" else 0
        system, turns = tuple(messages[:kept]), tuple(messages[kept:])
        found = cut_front(turns, lambda part: len(self.encode([*system, *part])) <= self.room)
        return None if found is None else (*system, *found)

    def respond(self, prompts: Sequence[Sequence[int]], key: jax.Array, rows: Sequence[int]) -> list[Response]:
        """One answer to each prompt, the i-th under the global row number rows[i]. A prompt that cannot be answered has one
        whose `error` says why."""
        return self._engine.respond(self.loaded.params, prompts, key, self.sampling, rows)

    def stream(self, prompt: Sequence[int], key: jax.Array, row: int) -> Iterator[tuple[int, ...]]:
        """The ids of one answer, chunk by chunk: those that `respond` gives. Raises UserError where it gives an error."""
        session = self._engine.start(self.loaded.params, [prompt], key, self.sampling, [row])
        shown = 0
        while session.unfinished:
            ended = session.step()
            ids = session.written(0)
            for _, response in ended:
                if response.error is not None:
                    raise UserError(response.error)
                ids = response.ids[:-1] if response.ended else response.ids
            yield ids[shown:]
            shown = len(ids)

    def text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """An answer's text. In style "plain" it is what comes after the prompt's text, its first space included."""
        decode = self.loaded.tokenizer.decode
        if self.style == "plain":
            before, whole = decode(prompt), decode([*prompt, *ids])
            if whole.startswith(before):
                return whole[len(before) :]
        return decode(ids)

    def say(self, prompt: Sequence[int], key: jax.Array, row: int, show: Callable[[str], None]) -> str:
        """An answer's text; `show` is called with each further piece of it as soon as it is settled."""
        ids: list[int] = []
        shown = text = ""
        for chunk in self.stream(prompt, key, row):
            ids += chunk
            text = self.text(prompt, ids)
            settled = text.rstrip("\ufffd")  # Bytes of a character that is not whole yet.
            if settled.startswith(shown):
                show(settled[len(shown) :])
                shown = settled
        show(text[len(shown) :] if text.startswith(shown) else f"\n{text}")
        return text

    @property
    def _engine(self) -> Engine:
        return Engine(self.loaded.model, self.batch, self.loaded.positions or _UNBOUNDED)


def make_answerer(loaded: Loaded, style: str, settings, rows: int) -> Answerer:
    """settings has max_new_tokens, temperature, top_k and top_p; rows: how many answers are wanted at once at most."""
    parts = 1 if loaded.model.sharding is None else loaded.model.sharding.generation.batch_size
    sampling = common.sampling(settings, loaded.tokenizer, style)
    if loaded.positions is not None and sampling.max_new_tokens >= loaded.positions:
        raise UserError(f"max_new_tokens is {sampling.max_new_tokens}, but the model was made for {loaded.positions} positions "
                        "(prompt and answer); lower it")
    return Answerer(loaded, style, sampling, -(-rows // parts) * parts)

