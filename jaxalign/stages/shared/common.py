"""What several stages set up alike: which model, which weights, which prompts, which keys."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import optax

from jaxalign import streams
from jaxalign.config import Config, to_dict
from jaxalign.data.chat import encoding as chat
from jaxalign.data.tokenizers import files as tokenizer_files
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.tokenizers.load import load_tokenizer as read_tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.speaker import Counted, Speaker
from jaxalign.models import flops
from jaxalign.models.adapters import peft_config, peft_folder
from jaxalign.models.adapters.lora import join, trained
from jaxalign.models.adapters.quantised import quantise, quantise_abstract
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.safetensors import weight_files
from jaxalign.models.configured import configured_model
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import placed
from jaxalign.parallel.sharding import Sharding, make_sharding
from jaxalign.registry.stages import policies_before
from jaxalign.rollout.engine import Engine, Heard
from jaxalign.rollout.sampling import Sampling, section_sampling
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.manifest import read_manifest
from jaxalign.tracking.progress import Progress
from jaxalign.tracking.timing import Timeline, Timing
from jaxalign.tracking.tracker import make_trackers
from jaxalign.trainers.fitting import peak_flops
from jaxalign.training.checkpoint import copy_params, load_params
from jaxalign.training.loop import Loop
from jaxalign.training.offload import FrozenRole
from jaxalign.training.state import TrainState, abstract_state

BASE_FIELDS = ("model", "seed")
MODEL_FIELDS = (*BASE_FIELDS, "lora")
WORLD_FIELDS = ("data.source", "world", "arithmetic")
LABEL_FIELDS = tuple(
    f"feedback.{name}"
    for name in (
        "constitution", "judge", "reasoning", "clamp_low", "clamp_high", "principles_per_comparison", "undecided_margin",
        "reasoning_temperature", "max_reasoning_tokens",
    )
)  # fmt: skip


def base_stages(config: Config) -> tuple[str, ...]:
    """The stage that makes the helpful-only base, if it is made here."""
    return ("pretrain",) if config.model.source == "scratch" else ()


def policy_stages(config: Config, before: str) -> tuple[str, ...]:
    """The stage whose weights stage `before` starts from: the last one run that makes a policy, or the base."""
    return policies_before(config.stages, before)[-1:] or base_stages(config)


def base_files(config: Config) -> dict[Path, str]:
    """The files of an outside base model, and of the adapters to start from."""
    if config.model.source == "scratch":
        return {}
    if config.lora.path:
        adapters = Path(config.lora.path).expanduser()
        own = {adapters / name: "lora.path" for name in (peft_config.CONFIG, peft_folder.WEIGHTS)}
        return own | base_files(dataclasses.replace(config, lora=dataclasses.replace(config.lora, path="")))
    folder = Path(config.model.path).expanduser()
    names = ("config.json", *tokenizer_files.NAMES, *weight_files(folder))
    found = {folder / name: "model.path" for name in names if (folder / name).exists()}
    return found or {folder / "config.json": "model.path"}


def stage_key(config: Config, stage: str, use: int | str = streams.STATE) -> jax.Array:
    """The PRNG key of one use of randomness in one stage: a number, or a name in `streams.KEYS[stage]`."""
    number = streams.KEYS[stage][use] if isinstance(use, str) else use
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), streams.stage_number(stage)), number)


@functools.cache
def sharding(config: Config) -> Sharding | None:
    """The run's mesh with its rules; None on one device, where there is nothing to place."""
    return make_sharding(config.mesh)


def load_tokenizer(context: StageContext) -> Tokenizer:
    if context.config.model.source == "huggingface":
        return read_tokenizer(context.config.model.path)
    return read_tokenizer(context.input_directory("pretrain") / "tokenizer.model")


def make_model(config: Config, vocab: int, head: str = "lm") -> Model:
    """The run's architecture, with its adapters. vocab is the tokenizer's size; an outside model says its own, which may be
    larger."""
    return configured_model(config, vocab, head, sharding(config))


_kept_base: dict[tuple, Params] = {}


def base_params(context: StageContext, model: Model) -> Params:
    """The weights of the helpful-only base. Those that adapters stand on are read once: every role shares them."""
    if model.lora is None:
        return _read_base(context, model)
    kind = context.config.lora.base
    key = (context.workdir, context.config.model, kind, _base_version(context), model.sharding)
    if key not in _kept_base:
        _kept_base.clear()
        _kept_base[key] = quantise(_read_base(context, model.base), kind)
    return _kept_base[key]


def _base_version(context: StageContext) -> tuple:
    """What changes when the base is made anew, or its files are replaced, while this process runs."""
    if context.config.model.source == "scratch":
        made = read_manifest(context.input_directory("pretrain"))
        return () if made is None else (made.output_hash,)
    found = [path.stat() for path in base_files(context.config) if path.exists()]
    return tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in found)


def _read_base(context: StageContext, model: Model) -> Params:
    if context.config.model.source == "huggingface":
        settings = context.config.model
        return huggingface.load_pretrained(
            settings.path, max_length=settings.max_length, compute_dtype=settings.compute_dtype, sharding=model.sharding,
            vocab_multiple=settings.vocab_multiple,
        ).params  # fmt: skip
    return load_params(context.input_directory("pretrain") / "params", model)


def start_params(context: StageContext, model: Model) -> Params:
    """The weights that the first policy stage starts from: the base, with the adapters of config.lora.path on it, if any.

    Raises UserError where those are of a model with a scalar head.
    """
    base, path = base_params(context, model), context.config.lora.path
    if not path:
        return base
    _, adapters = peft_folder.load_adapters(path, huggingface.read_config(context.config.model.path).family, model.base)
    if "score" in adapters:
        raise UserError(f"config.lora.path is {path!r}, whose adapters are of a reward model (modules_to_save has 'score'); "
                        "give those of a language model")
    return join(base, adapters)


def stage_params(context: StageContext, stage: str, model: Model) -> Params:
    """The final weights of an earlier stage, or those of the start under the name "base"; of a model with adapters, joined."""
    if stage in ("base", "pretrain"):
        return start_params(context, model)
    return with_base(context, model, load_params(context.input_directory(stage) / "params", model))


def with_base(context: StageContext, model: Model, params: Params) -> Params:
    """Trained parameters joined with the frozen ones they stand on, if any."""
    return params if model.lora is None else {**base_params(context, model), **params}


def frozen_params(context: StageContext, model: Model) -> Params | None:
    """The parameters that training leaves as they are: a base under adapters, or none."""
    return None if model.lora is None else base_params(context, model)


def abstract_training(
    config: Config, model: Model, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Params | None]:
    """ShapeDtypeStructs of a training state and of `frozen_params`, as a step is called with them."""
    frozen = None if model.lora is None else quantise_abstract(model.base.abstract(), config.lora.base)
    return placed((abstract_state(model, optimizer), frozen))


def frozen_role(context: StageContext, model: Model, params: Params) -> FrozenRole:
    """Parameters that are never trained, offloaded where the config says so. What adapters stand on, every phase reads."""
    return FrozenRole(params, "frozen" in context.config.mesh.offload, frozen_params(context, model))


def trained_params(context: StageContext, model: Model, params: Params, stage: str, shared: bool = True) -> Params:
    """What training starts from, of a policy's weights: all of them, or its adapters, fresh ones on the bare base. The buffers
    may be donated. shared: whether others read `params` too, so that training needs a copy."""
    if model.lora is None:
        return copy_params(params) if shared else params
    own = trained(params)
    return copy_params(own) if own else model.init_adapters(params, stage_key(context.config, stage, streams.ADAPTERS))


def policy_params(context: StageContext, model: Model, before: str) -> Params:
    """The weights that stage `before` starts from."""
    return stage_params(context, next(iter(policy_stages(context.config, before)), "base"), model)


def speaker(context: StageContext, model: Model, params: Params, batch: int, counted: Counted | None = None) -> Speaker:
    engine = Engine(model, batch, context.config.model.max_length)
    return Speaker(engine, params, load_tokenizer(context), counted)


def counting(progress: Progress) -> Heard:
    """For `Engine.rollout`: tells the tokens of responses as they end."""
    return lambda ended: progress.update(0, sum(len(response.ids) for _, response in ended))


def timing(context: StageContext, model: Model) -> Timing:
    """What a stage times its phases by."""
    return Timing(context.directory / "timing.jsonl", peak_flops(model))


def loop(context: StageContext, model: Model, total_steps: int, checkpoint_every: int, **more) -> Loop:
    """The stage's loop, with what all of them have alike; more: its other fields."""
    alike = {"stage": context.directory.name, "directory": context.directory, "began": context.began}
    alike |= {"peak": peak_flops(model), "profile": context.config.profile}
    alike |= {"trackers": make_trackers(context.config.tracking.trackers), "settings": to_dict(context.config)}
    return Loop(total_steps=total_steps, checkpoint_every=checkpoint_every, **{**alike, **more})


class Meter:
    """Counts what `Speaker`s do with one model: told to a progress bar at once, and to the phases that `phase` times."""

    def __init__(self, timing: Timing | Timeline, model: Model, progress: Progress | None = None):
        self._timing, self._model, self._progress = timing, model, progress
        self._tokens, self._flops = 0, 0.0

    def __call__(self, lengths: Sequence[int], tokens: int, heads: int) -> None:
        """What `Speaker.counted` is told."""
        self._tokens, self._flops = self._tokens + tokens, self._flops + flops.forward(self._model, lengths, heads)
        if self._progress is not None:
            self._progress.update(0, heads)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the body, with all that was counted in it."""
        tokens, operations = self._tokens, self._flops
        with self._timing.phase(name) as phase:
            yield
            phase.tokens, phase.flops = self._tokens - tokens, self._flops - operations


def sampling(section, tokenizer: Tokenizer, style: str = "compact") -> Sampling:
    """The sampling of a config section that has temperature, top_k, top_p and max_new_tokens. It stops where answers in this
    style end."""
    return section_sampling(section, chat.stop_ids(tokenizer) if style == "chat" else tokenizer.stop_ids)
