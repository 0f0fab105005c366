"""A language model with all that comes with it: architecture, weights, tokenizer, and how it writes dialogues.

`load_model` reads a Hugging Face folder, a folder in Orbax's layout that `jaxalign.convert` wrote, or the folder of a finished
stage of a run. `LanguageModel.save` writes Hugging Face's layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxalign.config import Lora, Mesh
from jaxalign.data.chat.styles import choose_style, encode_answer, encode_prompt, stop_ids
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import is_quantised, join, merge
from jaxalign.models.adapters.peft_folder import export_adapters, load_adapters
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints import huggingface, run_folder
from jaxalign.models.checkpoints.export import SHARD_BYTES, export
from jaxalign.models.checkpoints.huggingface import DTYPES
from jaxalign.models.checkpoints.orbax import load_params
from jaxalign.models.configured import adapted
from jaxalign.models.model import Model, Params
from jaxalign.parallel.sharding import make_sharding
from jaxalign.records import Message, Prompt
from jaxalign.registry.families import FAMILIES, Family, use_family

UNBOUNDED = 1 << 20
"""The longest sequence of a model whose config.json names no limit."""

Asked = str | Prompt | Sequence[Message] | Sequence[Mapping[str, str]]
"""A prompt as a caller may write it."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a Hugging Face folder needs beside the weights.

    Attributes:
      fields: of config.json.
      folder: the folder whose tokenizer files and generation_config.json are copied.
      files: texts of further files by name.
    """

    fields: Mapping[str, Any]
    folder: Path
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel:
    """A language model.

    Attributes:
      model: the architecture, with its mesh and adapters.
      params: the weights that training changes: all of them, or the adapters. `weights` joins them with `frozen`.
      tokenizer: text to ids and back.
      style: how dialogues are written: "chat", "hh", "compact", or "plain" (one text, which the answer continues).
      max_length: the longest prompt and response together, in tokens.
      frozen: the weights under adapters; None without adapters.
      origin: what `save` writes beside the weights; None where the model was not read from a folder.
    """

    model: Model
    params: Params
    tokenizer: Tokenizer
    style: str
    max_length: int
    frozen: Params | None = None
    origin: Origin | None = None

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.model.base.abstract()))
        adapters = "" if self.model.lora is None else f", adapters of rank {self.model.lora.rank}"
        return f"LanguageModel({count:,} parameters{adapters}, style {self.style!r}, max_length {self.max_length})"

    @property
    def weights(self) -> Params:
        """All parameters, as `Model.hidden`, sampling and scoring read them."""
        return join(self.frozen, self.params)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids that end an answer."""
        return stop_ids(self.tokenizer, self.style)

    def with_params(self, params: Params) -> LanguageModel:
        """The same model with other trained parameters, such as those of a training state."""
        return dataclasses.replace(self, params=params)

    def messages(self, prompt: Asked) -> tuple[Message, ...]:
        """The dialogue of a prompt. A text is the one message of the user.

        Raises:
          UserError: it is no text, no `Prompt` and no list of messages with a role and a content.
        """
        return as_messages(prompt)

    def prompt_ids(self, prompt: Asked) -> list[int]:
        """The token ids of a prompt up to where the answer begins, in the model's style.

        Args:
          prompt: a text, a list of {"role", "content"} or `Message`, or a `Prompt`.

        Raises:
          UserError: it is none of these, is empty, or cannot be written in the style.
        """
        ids = encode_prompt(self.tokenizer, as_messages(prompt), self.style)
        if not ids:
            raise UserError(f"the prompt {prompt!r} has no tokens; give a text that is not empty")
        return ids

    def answer_ids(self, text: str) -> list[int]:
        """The token ids of an answer, with the token that ends it."""
        return encode_answer(self.tokenizer, text, self.style)

    def text(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text of an answer's ids. In the style "plain" it is what follows the text of `prompt`, its first space
        included."""
        if self.style == "plain" and len(prompt):
            before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode([*prompt, *ids])
            if whole.startswith(before):
                return whole[len(before) :]
        return self.tokenizer.decode(ids)

    def save(
        self, folder: str | Path, dtype: str = "float32", adapters: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Writes the model in Hugging Face's layout; the folder appears whole or not at all.

        Args:
          folder: must not exist, or be empty.
          dtype: of the weights: "float32", "bfloat16" or "float16".
          adapters: write the adapters in PEFT's layout. By default they are merged into their base and the whole model is
            written.
          shard_bytes: the largest safetensors file.

        Raises:
          UserError: the folder is in use, the weights are not finite, there are no adapters, or the model was not read from a
            folder, so that its tokenizer files and config.json are unknown.
        """
        folder = Path(folder).expanduser()
        if self.origin is None:
            raise UserError(f"the model cannot be saved to {folder}: its tokenizer files and config.json are unknown; make it "
                            "with load_model")
        if dtype not in DTYPES:
            raise UserError(f"dtype is {dtype!r}; one of {', '.join(DTYPES)} is expected")
        if adapters:
            if self.model.lora is None:
                raise UserError("the model has no adapters to save; leave out adapters=True")
            family = huggingface.parse_config(folder / "config.json", dict(self.origin.fields)).family
            export_adapters(folder, family, self.model, self.params, str(self.origin.folder))
            return
        model, params = merged(self.model, self.weights)
        export(
            folder, model, params, config=self.origin.fields, source=self.origin.folder, files=self.origin.files, dtype=dtype,
            shard_bytes=shard_bytes,
        )  # fmt: skip


def merged(model: Model, weights: Params) -> tuple[Model, Params]:
    """A model without adapters and its parameters: the adapters are added to the kernels they belong to."""
    if model.lora is None:
        return model, weights
    whole, params = dataclasses.replace(model, lora=None), merge(model.lora, weights)
    return whole, {name: value for name, value in params.items() if name in whole.abstract()}


def as_messages(prompt: Asked) -> tuple[Message, ...]:
    """The dialogue of a prompt: a text, a `Prompt`, or messages as `Message` or {"role", "content"}.

    Raises:
      UserError: it is none of these.
    """
    if isinstance(prompt, Prompt):
        return prompt.messages
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    if not isinstance(prompt, Sequence) or not prompt:
        raise UserError(f"a prompt is {str(prompt)[:60]!r}; a text, or a list of {{'role', 'content'}}, is expected")
    return tuple(_message(item) for item in prompt)


def _message(item: Any) -> Message:
    if isinstance(item, Message):
        return item
    role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise UserError(f"a message of a prompt is {str(item)[:60]!r}; {{'role': 'system', 'user' or 'assistant', 'content': "
                        "text} is expected")
    return Message(role, content)


def load_model(
    folder: str | Path,
    mesh: Mesh | None = None,
    *,
    max_length: int = 0,
    dtype: str | None = "float32",
    compute_dtype: str | None = None,
    style: str | None = None,
    lora: Lora | None = None,
    family: str | Family | None = None,
    seed: int = 0,
) -> LanguageModel:
    """Loads a language model.

    Args:
      folder: in Hugging Face layout (config.json, safetensors, tokenizer), in Orbax's layout as `jaxalign.convert` writes it,
        or of a finished stage of a run, such as runs/quickstart/ppo.
      mesh: how many devices share the model, and how; None for the first device.
      max_length: the longest prompt and response together, in tokens; 0 for what the model was made for.
      dtype: of the parameters; None for the dtype of the files (float32 for a stage).
      compute_dtype: of activations; None for the run's, and float32 elsewhere.
      style: "chat" (the model's chat template), "hh", "compact" or "plain"; None for the run's, else "chat" where there is a
        template, else "plain".
      lora: adapters to train on frozen weights: fresh ones, or those of the PEFT folder `lora.path`.
      family: a model family of one's own, as a record or as "package.module:name" or "FILE.py:name" of one. Those that are
        registered are found by the model_type of config.json.
      seed: of fresh adapters.

    Raises:
      UserError: the folder is none of these or is damaged, holds a reward model, or does not fit the mesh or `max_length`.
    """
    folder, mesh = Path(folder).expanduser(), mesh or Mesh()
    if family is not None:
        FAMILIES.register(family) if isinstance(family, Family) else use_family(family, "family")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a model's folder, or a stage's folder of a run")
    orbax = (folder / "params").is_dir()
    if not run_folder.is_model(folder) and (orbax or run_folder.is_stage(folder)):
        found = _load_stage(folder, mesh, max_length, dtype, compute_dtype, style)
        if lora is not None:
            raise UserError(f"lora is given, but {folder} is a stage of a run, which has the adapters of its config; save the "
                            "model and load it again to train fresh adapters on it")
        return found
    # A folder in Orbax's layout has padded tables already; others are padded to a multiple of what the mesh splits them into.
    config = huggingface.read_config(folder, compute_dtype or "float32", 1 if orbax else mesh.tensor)
    if config.head != "lm":
        raise UserError(f"{folder} holds a {config.family.classifier}, which scores texts; a language model is expected")
    model = Model(config.decoder, "lm", make_sharding(mesh))
    huggingface.check_mesh(model)
    tokenizer = load_tokenizer(folder)
    huggingface.check_vocabulary(folder, config, tokenizer)
    style = choose_style(tokenizer, style)
    length = _length(folder, max_length, config.max_positions)
    dtype = dtype or huggingface.own_dtype(config.raw)
    params = load_params(folder / "params", model, dtype) if orbax else huggingface.load_params(folder, model, dtype)
    found = LanguageModel(model, params, tokenizer, style, length, None, Origin(config.raw, folder))
    return found if lora is None else _with_adapters(found, config.family, lora, seed)


def _load_stage(
    folder: Path, mesh: Mesh, max_length: int, dtype: str | None, compute_dtype: str | None, style: str | None
) -> LanguageModel:
    stage = run_folder.finished_stage(folder)
    makers = run_folder.LANGUAGE_MODEL_STAGES
    if stage.name not in makers:
        raise UserError(f"{folder} is of the stage {stage.name}, which makes no language model; give one of "
                        f"{', '.join(makers)}")
    settings = stage.config.model
    if compute_dtype is not None:
        settings = dataclasses.replace(settings, compute_dtype=compute_dtype)
    stage = stage._replace(config=dataclasses.replace(stage.config, model=settings, mesh=mesh))
    base = run_folder.base_of(stage.config, stage.workdir)
    model = run_folder.policy_model(stage, base.vocab, make_sharding(mesh))
    frozen = run_folder.frozen_base(stage.config, stage.workdir, model)
    params = load_params(stage.weights / "params", model)
    if dtype not in (None, "float32"):
        params, frozen = jax.tree.map(
            lambda leaf: leaf if is_quantised(leaf) else leaf.astype(dtype), (params, frozen), is_leaf=is_quantised
        )
    length = _length(folder, max_length, base.fields.get("max_position_embeddings"))
    style = choose_style(base.tokenizer, style, stage.config.data.style)
    return LanguageModel(model, params, base.tokenizer, style, length, frozen, Origin(base.fields, base.folder, base.files))


def _with_adapters(found: LanguageModel, family: Family, lora: Lora, seed: int) -> LanguageModel:
    """The model with its weights frozen under adapters."""
    if not lora.rank and not lora.path:
        raise UserError("lora.rank is 0 and lora.path is empty, so that nothing would be trained; set one of them")
    model, frozen = adapted(lora, found.model, family), quantise(found.params, lora.base)
    if lora.path:
        _, params = load_adapters(lora.path, family, found.model)
        if "score" in params:
            raise UserError(f"lora.path is {lora.path!r}, whose adapters are of a reward model (modules_to_save has 'score'); "
                            "give those of a language model")
    else:
        params = model.init_adapters(frozen, jax.random.key(seed))
    return dataclasses.replace(found, model=model, params=params, frozen=frozen)


def _length(folder: Path, asked: int, positions: int | None) -> int:
    if positions is not None and asked > positions:
        raise UserError(f"max_length is {asked}, but {folder} was made for at most {positions} positions; lower it")
    return asked or positions or UNBOUNDED
