"""A user's reward model, which has its own tokenizer and chat template and scores texts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxalign.algorithms.rewards import normalise_scores
from jaxalign.config import Config, RewardConfig
from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.dialogues import cut_front
from jaxalign.data.chat.styles import encode_answer, encode_prompt, require_style
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.tokenizers import files as tokenizer_files
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.safetensors import weight_files
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.parallel.sharding import Sharding
from jaxalign.records import Message
from jaxalign.registry.core import names_in
from jaxalign.rewards.base import DroppedRows, Reward, RewardBatch, Scored
from jaxalign.rewards.scorer import Scorer, raw_sequence_scores
from jaxalign.steps.offload import FrozenRole

_LEAST_LENGTH = 64


def model_files(config: Config) -> dict[Path, str]:
    """The files of the config's reward model, if any, with the config field that names them."""
    if "model" not in names_in(config.reward.source):
        return {}
    folder = Path(config.reward.model).expanduser()
    names = ("config.json", *tokenizer_files.NAMES, *weight_files(folder))
    files = {folder / name: "reward.model" for name in names if (folder / name).exists()}
    return files or {folder / "config.json": "reward.model"}


class OutsideModel(NamedTuple):
    """A reward model that scores texts. style: the format in which it reads dialogues; max_length: the maximum length of
    its input, in tokens; batch: the number of texts per forward pass."""

    scorer: Scorer
    params: Params
    tokenizer: Tokenizer
    style: str
    max_length: int
    batch: int

    def encode(self, messages: Sequence[Message], response: str) -> list[int] | None:
        """The ids of an answered dialogue, without its oldest turns if it is too long.

        None if even the last question with the answer is too long, or if the chat template rejects the dialogue.
        """
        try:
            kept = cut_front(tuple(messages), lambda part: len(self._written(part, response)) <= self.max_length)
        except DialogueRefused:
            return None
        return None if kept is None else self._written(kept, response)

    def _written(self, messages: Sequence[Message], response: str) -> list[int]:
        """The ids of a dialogue: in style "chat", those of the whole dialogue in the template; else prompt, answer and eos."""
        if self.style == "chat":
            return chat.encode_whole(self.tokenizer, [*messages, Message("assistant", response)])
        return encode_prompt(self.tokenizer, messages, self.style) + encode_answer(self.tokenizer, response, self.style)

    def score(self, dialogues: Sequence[Sequence[Message]], responses: Sequence[str]) -> np.ndarray:
        """float32 [B]: raw scores, from the head at the last token of each text; NaN where `encode` returns None."""
        ids = [self.encode(*pair) for pair in zip(dialogues, responses, strict=True)]
        order = sorted((i for i, text in enumerate(ids) if text), key=lambda i: len(ids[i]))
        scores = np.full(len(ids), np.nan, np.float32)
        for start in range(0, len(order), self.batch):
            index = order[start : start + self.batch]
            # Pad to powers of two, so that few programs are compiled.
            longest = len(ids[index[-1]])
            room = min(self.max_length, max(_LEAST_LENGTH, 1 << (longest - 1).bit_length()))
            tokens, length = np.zeros((self.batch, room), np.int32), np.zeros(self.batch, np.int32)
            for row, i in enumerate(index):
                tokens[row, : len(ids[i])], length[row] = ids[i], len(ids[i])
            arrays = place_rows(self.scorer.model.sharding, (tokens, length))
            scores[index] = fetch(raw_sequence_scores(self.scorer, self.params, *arrays))[: len(index)]
        return scores


class OutsideReward(Reward):
    """Normalised scores of a `RewardModel`: responses are decoded and encoded again with the model's own tokenizer.

    Args:
      model: the reward model; this object takes ownership of its weights.
      offload: whether to keep its weights in host memory while it does not score.
      max_dropped_share: see `DroppedRows`.
    """

    is_checked = True

    def __init__(self, model: OutsideModel, offload: bool, max_dropped_share: float):
        self.name = "model"
        self.model, self.role = model._replace(params=None), FrozenRole(model.params, offload)
        self._dropped = DroppedRows("reward.model", max_dropped_share)

    def score(self, batch: RewardBatch) -> Scored:
        """Scores [B]; dialogues that the model cannot read are dropped."""
        responses = batch.responses
        with self.role.on_device() as params:
            raw = self.model._replace(params=params).score([prompt.messages for prompt in batch.prompts], responses)
        scored, scorer = np.isfinite(raw), self.model.scorer
        why = "the last question and the answer are too long, its template rejects the dialogue, or the score is not finite"
        self._dropped.check(int(np.sum(~scored)), len(scored), why)
        return Scored(normalise_scores(np.where(scored, raw, 0), scorer.shift, scorer.scale, scorer.clip), scored)


def load_reward_model(settings: RewardConfig, sharding: Sharding, clip: float | None = None) -> OutsideModel:
    """The reward model of `config.reward.model`, on the mesh.

    Raises:
      UserError: the folder is damaged or not a sequence classifier with one label, its tokenizer does not fit it, or the
        settings do not suit it.
    """
    folder = Path(settings.model).expanduser()
    if not os.path.isfile(folder / "config.json"):
        raise UserError(f"config.reward.model is {settings.model}, which has no config.json; give the folder of a "
                        "...ForSequenceClassification in Hugging Face format")
    checkpoint = huggingface.read_config(folder, settings.model_dtype, sharding.mesh.shape["tensor"])
    if checkpoint.head != "scalar":
        raise UserError(f"config.reward.model is {settings.model}, a {checkpoint.family.architecture}; a "
                        f"{checkpoint.family.classifier} with one label is expected")
    tokenizer = load_tokenizer(folder)
    huggingface.check_vocabulary(folder, checkpoint, tokenizer)
    model = Model(checkpoint.decoder, "scalar", sharding)
    params = huggingface.load_params(folder, model, settings.model_dtype)
    parts = sharding.batch_size
    return OutsideModel(
        Scorer(model, settings.model_shift, settings.model_scale, clip), params, tokenizer, _style(settings, tokenizer),
        _max_length(settings, checkpoint.max_positions), -(-settings.model_batch // parts) * parts,
    )


def _style(settings: RewardConfig, tokenizer: Tokenizer) -> str:
    style = settings.model_style
    if style == "auto":
        return "hh" if tokenizer.files.chat_template is None else "chat"
    require_style(tokenizer, style, "config.reward.model_style")
    return style


def _max_length(settings: RewardConfig, positions: int | None) -> int:
    asked = settings.model_max_length
    if positions is None and not asked:
        raise UserError(f"{settings.model} does not state its number of positions; set config.reward.model_max_length")
    if positions is not None and asked > positions:
        raise UserError(f"config.reward.model_max_length is {asked}, but {settings.model} has only {positions} positions; "
                        "lower it")
    return asked or positions
