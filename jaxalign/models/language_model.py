"""A complete language model: architecture, weights, tokenizer and dialogue style.

`load_model` reads a Hugging Face folder, an Orbax folder that `jaxalign.convert` wrote, or the folder of a finished stage of a
run. `LanguageModel.save` writes the Hugging Face layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.config import Config, Lora, Mesh, ModelConfig
from jaxalign.config.arguments import SEED, as_path, as_text, as_token_ids, instance_of
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.finished import is_model, is_stage, language_model_stage
from jaxalign.config.schema import checked
from jaxalign.data.chat.model_style import model_style
from jaxalign.data.chat.styles import STYLES, choose_style, encode_answer, encode_prompt, stop_ids
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.adapters.peft_folder import export_adapters, load_adapters
from jaxalign.models.checkpoints import huggingface, run_folder
from jaxalign.models.checkpoints.export import SHARD_BYTES, export
from jaxalign.models.checkpoints.huggingface import dtype_name
from jaxalign.models.checkpoints.model_folder import StoredModel, read_folder, supported_length
from jaxalign.models.checkpoints.run_folder import merged
from jaxalign.models.configured import adapted
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import committed
from jaxalign.parallel.sharding import keeps_gathered, make_sharding
from jaxalign.records import Message, Prompt
from jaxalign.registry.families import FAMILIES, Family, use_family

Asked = str | Prompt | Sequence[Message] | Sequence[Mapping[str, str]] | Mapping[str, Any]
"""The forms of a prompt that callers may pass."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The contents of a Hugging Face folder other than the weights.

    Attributes:
      fields: the fields of config.json.
      folder: the folder whose tokenizer files and generation_config.json are copied.
      files: the texts of further files, by name.
    """

    fields: Mapping[str, Any]
    folder: Path
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel:
    """A language model.

    Attributes:
      model: the architecture, with its mesh and adapters. A mesh of one device follows the device of `params`.
      params: the weights that training changes: all of them, or the adapters. `weights` joins them with `frozen`.
      tokenizer: converts text to token ids and back.
      style: the format of dialogues: "chat", "hh", "compact", or "plain" (one text, which the answer continues).
      max_length: the maximum length of prompt plus response, in tokens.
      frozen: the weights under the adapters; None without adapters.
      origin: the other files that `save` writes; None if the model was not read from a folder.
    """

    model: Model
    params: Params
    tokenizer: Tokenizer
    style: str
    max_length: int
    frozen: Params | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        instance_of(self.model, Model, "LanguageModel(model)", "a jaxalign Model, as load_model creates it,")
        instance_of(self.tokenizer, Tokenizer, "LanguageModel(tokenizer)", "the tokenizer of a loaded model")
        checked(self.style, str, "LanguageModel(style)", one_of(*STYLES))
        checked(self.max_length, int, "LanguageModel(max_length)", at_least(1))
        _require_params(self.model, self.params)
        model = self.model.on_device_of(self.params)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "params", committed(model.sharding, self.params))
        object.__setattr__(self, "frozen", committed(model.sharding, self.frozen))

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.model.base.abstract()))
        adapters = "" if self.model.lora is None else f", adapters of rank {self.model.lora.rank}"
        return f"LanguageModel({count:,} parameters{adapters}, style {self.style!r}, max_length {self.max_length})"

    @property
    def weights(self) -> Params:
        """All parameters, joined as `Model.hidden`, sampling and scoring expect them."""
        return join(self.frozen, self.params)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids that end an answer."""
        return stop_ids(self.tokenizer, self.style)

    def with_params(self, params: Params) -> LanguageModel:
        """The same model with other trained parameters, for example from a training state.

        Raises:
          UserError: the names or shapes of `params` differ from those of the model's own parameters.
        """
        return dataclasses.replace(self, params=params)

    def messages(self, prompt: Asked) -> tuple[Message, ...]:
        """The dialogue of a prompt. A plain text becomes a single user message.

        Raises:
          UserError: the prompt is not a text, a `Prompt`, a list of messages with a role and a content, or {"prompt": either}.
        """
        return as_messages(prompt)

    def prompt_ids(self, prompt: Asked) -> list[int]:
        """The token ids of a prompt in the model's style, up to the start of the answer.

        Args:
          prompt: a text, a list of {"role", "content"} or `Message`, a `Prompt`, or {"prompt": a text or a list}.

        Raises:
          UserError: the prompt is none of these, is empty, or cannot be written in the model's style.
        """
        ids = encode_prompt(self.tokenizer, as_messages(prompt), self.style)
        if not ids:
            raise UserError(f"the prompt {prompt!r} has no tokens; give a non-empty prompt")
        return ids

    def answer_ids(self, text: str) -> list[int]:
        """The token ids of an answer, with the token that ends it."""
        return encode_answer(self.tokenizer, as_text(text, "text"), self.style)

    def text(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """Decodes an answer's ids. In the style "plain" the result is the continuation of the text of `prompt`, including a
        leading space.

        Args:
          ids: the token ids of the answer.
          prompt: those of the prompt. Other styles than "plain" only check them.

        Raises:
          UserError: an argument is not a sequence of token ids of the model.
        """
        count = max(self.model.config.vocab, self.tokenizer.vocab_size)  # A model can sample ids that have no text.
        ids, prompt = as_token_ids(ids, "ids", count), as_token_ids(prompt, "prompt", count)
        if self.style == "plain" and len(prompt):
            before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode([*prompt, *ids])
            if whole.startswith(before):
                return whole[len(before) :]
        return self.tokenizer.decode(ids)

    def save(
        self, folder: str | Path, dtype: str = "float32", adapters: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Writes the model in the Hugging Face layout. The write is atomic: the folder is complete or does not exist.

        Args:
          folder: a new or empty folder.
          dtype: the dtype of the weights: "float32", "bfloat16" or "float16".
          adapters: write only the adapters, in the PEFT layout. By default they are merged into their base and the whole
            model is written.
          shard_bytes: the maximum size of a safetensors file.

        Raises:
          UserError: the folder is not empty, the weights are not finite, `adapters` is set but there are none, or the model
            was not read from a folder, so its tokenizer files and config.json are unknown.
        """
        folder, dtype = as_path(folder, "folder", written=True), dtype_name(dtype, "dtype")
        adapters = checked(adapters, bool, "adapters")
        shard_bytes = checked(shard_bytes, int, "shard_bytes", at_least(1))
        if self.origin is None:
            raise UserError(f"the model cannot be saved to {folder}: its tokenizer files and config.json are unknown; load "
                            "the model with load_model")
        if adapters:
            if self.model.lora is None:
                raise UserError("the model has no adapters to save; omit adapters=True")
            family = huggingface.parse_config(folder / "config.json", dict(self.origin.fields)).family
            export_adapters(folder, family, self.model, self.params, str(self.origin.folder), self.origin.folder,
                            self.origin.files)
            return
        model, params = merged(self.model, self.weights)
        export(
            folder, model, params, config=self.origin.fields, source=self.origin.folder, files=self.origin.files, dtype=dtype,
            shard_bytes=shard_bytes,
        )


def as_messages(prompt: Asked) -> tuple[Message, ...]:
    """The dialogue of a prompt: a text, a `Prompt`, messages as `Message` or {"role", "content"}, or a row with a "prompt".

    Raises:
      UserError: the prompt is none of these.
    """
    if isinstance(prompt, Mapping) and "prompt" in prompt:
        prompt = prompt["prompt"]
    if isinstance(prompt, Prompt):
        return prompt.messages
    if isinstance(prompt, str):
        return (Message("user", as_text(prompt, "a prompt")),)
    if not isinstance(prompt, Sequence) or not prompt:
        raise UserError(f"a prompt is {str(prompt)[:60]!r}; a string, a list of {{'role', 'content'}}, or {{'prompt': either}} "
                        "is expected")
    return tuple(_message(item) for item in prompt)


def _message(item: Any) -> Message:
    if isinstance(item, Message):
        return item
    role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise UserError(f"a message of a prompt is {str(item)[:60]!r}; {{'role': 'system', 'user' or 'assistant', 'content': "
                        "text} is expected")
    return Message(role, as_text(content, "the content of a message"))


def _require_params(model: Model, params: Params) -> None:
    """Raises UserError unless the parameters have the names and shapes of the model's own."""
    trees = (jax.tree.map(jnp.shape, model.abstract()), jax.tree.map(np.shape, params))
    expected, given = (
        {jax.tree_util.keystr(path): shape
         for path, shape in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, tuple))}
        for tree in trees
    )
    for name in (*expected, *given):
        own, other = (f"of shape {tree[name]}" if name in tree else "absent" for tree in (expected, given))
        if own != other:
            raise UserError(f"params{name} is {other}, but {own} in the model; give parameters with the model's names and "
                            "shapes, such as its own `params` after updates")


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
      folder: a Hugging Face folder (config.json, safetensors, tokenizer), an Orbax folder written by `jaxalign.convert`, or
        the folder of a finished stage of a run, such as runs/quickstart/ppo.
      mesh: how many devices share the model, and how; None for the first device.
      max_length: the maximum length of prompt plus response, in tokens; 0 for the model's own limit.
      dtype: the dtype of the parameters; None for that of the files (float32 for a stage).
      compute_dtype: the dtype of activations; None for the run's setting, or float32 for other folders.
      style: "chat" (the model's chat template), "hh", "compact" or "plain". None for the run's style; for other folders "chat"
        if there is a chat template, "compact" if the tokenizer has jaxalign's markers, else "plain".
      lora: adapters to train on frozen weights: new ones, or those of the PEFT folder `lora.path`.
      family: a custom model family: a record, "package.module:name" or "FILE.py:name". Registered
        families are found by the model_type in config.json.
      seed: the seed of new adapters.

    Raises:
      UserError: the folder is none of these, is damaged, contains a reward model, or does not fit the mesh or `max_length`.
    """
    folder, mesh = as_path(folder, "folder"), Mesh() if mesh is None else mesh
    instance_of(mesh, Mesh, "mesh", "a jaxalign.Mesh, such as Mesh(data=2), or None")
    _check_mesh(mesh)
    instance_of(lora, Lora | None, "lora", "a jaxalign.Lora, such as Lora(rank=8), or None")
    if lora is not None:
        _check_lora(lora)
    instance_of(family, str | Family | None, "family", "a Family, 'package.module:name', 'FILE.py:name' or None")
    max_length = checked(max_length, int, "max_length", between(0, 2**31 - 1))
    style, seed = checked(style, str | None, "style", one_of(*STYLES)), checked(seed, int, "seed", SEED)
    dtype = None if dtype is None else dtype_name(dtype, "dtype")
    compute_dtype = None if compute_dtype is None else dtype_name(compute_dtype, "compute_dtype")
    if family is not None:
        FAMILIES.register(family) if isinstance(family, Family) else use_family(family, "family")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a model, or of a stage of a run")
    orbax = (folder / "params").is_dir()
    if is_stage(folder) or (orbax and not is_model(folder)):
        loaded = _load_stage(folder, mesh, max_length, dtype, compute_dtype, style)
        if lora is not None:
            raise UserError(f"lora is given, but {folder} is a stage of a run, which has the adapters of its config; save the "
                            "model and load it again to train new adapters on it")
        return loaded
    parts = read_folder(folder, mesh, max_length, dtype, compute_dtype, style, "float32" if lora is None else lora.base)
    if lora is not None:
        return _with_adapters(parts, folder, lora, seed)
    model, params, tokenizer, style, length, config = parts
    return LanguageModel(model, params, tokenizer, style, length, None, Origin(config.raw, folder))


def _load_stage(
    folder: Path, mesh: Mesh, max_length: int, dtype: str | None, compute_dtype: str | None, style: str | None
) -> LanguageModel:
    stage = language_model_stage(folder)
    if compute_dtype is not None:
        settings = dataclasses.replace(stage.config.model, compute_dtype=compute_dtype)
        stage = stage._replace(config=dataclasses.replace(stage.config, model=settings))
    base = run_folder.base_of(stage.config, stage.workdir)
    model, params, frozen = run_folder.stage_policy(stage, make_sharding(mesh), dtype or "float32")
    length = supported_length(folder, max_length, base.fields.get("max_position_embeddings"))
    style = choose_style(base.tokenizer, style, model_style(stage.config))
    return LanguageModel(model, params, base.tokenizer, style, length, frozen, Origin(base.fields, base.folder, base.files))


def _check_mesh(mesh: Mesh) -> None:
    """Raises UserError if the mesh has an option that only a run applies, or that has no effect."""
    if mesh.offload:
        raise UserError(f"mesh.offload is {mesh.offload}, which only the stages ppo and online_dpo of a run apply "
                        "(config.mesh.offload); leave it empty")
    if mesh.keep_gathered == "auto":
        raise UserError("mesh.keep_gathered is 'auto', which only a run of stages chooses; set it to 'never' or 'always'")
    if mesh.keep_gathered == "always" and not keeps_gathered(mesh):
        raise UserError("mesh.keep_gathered is 'always', which has no effect unless fsdp is above 1 and zero is 3; set it to "
                        "'never'")


def _check_lora(lora: Lora) -> None:
    if not lora.rank and not lora.path:
        raise UserError("lora.rank is 0 and lora.path is empty, so nothing would be trained; set one of them")
    try:
        lora.check(dataclasses.replace(Config(), model=ModelConfig(source="huggingface")), "lora")
    except UserError as error:
        raise UserError(str(error).replace("config.lora.", "lora.")) from None


def _with_adapters(base: StoredModel, folder: Path, lora: Lora, seed: int) -> LanguageModel:
    """The model with frozen weights and adapters."""
    family = base.config.family
    model = adapted(lora, base.model, family)
    if lora.path:
        _, params = load_adapters(lora.path, family, base.model)
        if "score" in params:
            raise UserError(f"lora.path is {lora.path!r}, a reward model's adapters (modules_to_save has 'score'); "
                            "give adapters of a language model")
    else:
        params = model.init_adapters(base.params, jax.random.key(seed))
    return LanguageModel(model, params, base.tokenizer, base.style, base.max_length, base.params,
                         Origin(base.config.raw, folder))
