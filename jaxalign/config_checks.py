"""What must hold between fields of the config, beyond each field's own check.

Only the sections of stages that are to run are judged: a mesh need not divide a batch that is never made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxalign.errors import UserError

if TYPE_CHECKING:
    from jaxalign.config import Config


def check(config: Config) -> None:
    """Raises UserError at the first pair of fields that do not fit together."""
    _check_model(config)
    _check_data(config)
    _check_tensor(config)
    for name, rows, parts in _batches(config):
        _check_batch(config, name, rows, parts)
    _check_lengths(config)
    _check_controller(config)


def _check_model(config: Config) -> None:
    model = config.model
    if model.source == "huggingface":
        if not model.path:
            raise UserError("config.model.source is 'huggingface' but config.model.path is empty; set it to the folder "
                            "with config.json, the safetensors weights and tokenizer.model")
        return
    if model.heads % model.kv_heads:
        raise UserError(f"config.model.heads is {model.heads}; it must be a multiple of config.model.kv_heads "
                        f"({model.kv_heads})")
    if model.head_dim % 2:
        raise UserError(f"config.model.head_dim is {model.head_dim}; an even number is expected, for the rotary "
                        "positions")


def _check_data(config: Config) -> None:
    if config.data.source == "preferences_jsonl":
        if not config.data.train:
            raise UserError("config.data.source is 'preferences_jsonl' but config.data.train is empty; set it to a "
                            "JSONL file (.gz too) of dialogues, each row with \"chosen\" and \"rejected\"")
    elif config.world.held_out_topics >= config.world.topics:
        raise UserError(f"config.world.held_out_topics is {config.world.held_out_topics}; it must be below "
                        f"config.world.topics ({config.world.topics}), so that some are left to learn from")


def _check_tensor(config: Config) -> None:
    """What the mesh splits must split evenly. A checkpoint's sizes are known only once it is read."""
    if config.model.source == "huggingface":
        return
    model, mesh = config.model, config.mesh
    sizes = {"config.model.heads": model.heads, "config.model.kv_heads": model.kv_heads, "config.model.mlp": model.mlp}
    if config.data.source == "world":
        sizes["config.world.vocab_size"] = config.world.vocab_size
    for name, size in sizes.items():
        if size % mesh.tensor:
            raise UserError(f"config.mesh.tensor is {mesh.tensor}; it must divide {name} ({size}): change either")
    if model.embed % mesh.fsdp:
        raise UserError(f"config.mesh.fsdp is {mesh.fsdp}; it must divide config.model.embed ({model.embed}): "
                        "change either")


def _batches(config: Config) -> list[tuple[str, int, dict[str, int]]]:
    """Every batch that will be made: its field, its size, and the fields whose product must divide it."""
    ppo = config.ppo
    batches = {
        "pretrain": [("pretrain.batch_rows", config.pretrain.batch_rows,
                      {"pretrain.micro_batches": config.pretrain.micro_batches})],
        "revise": [("revise.batch", config.revise.batch, {})],
        "sft": [("sft.batch_rows", config.sft.batch_rows, {"sft.micro_batches": config.sft.micro_batches})],
        "compare": [("compare.batch", config.compare.batch, {})],
        "preference": [("preference.batch", config.preference.batch,
                        {"preference.micro_batches": config.preference.micro_batches})],
        "ppo": [("ppo.batch", ppo.batch, {"ppo.minibatches": ppo.minibatches, "ppo.micro_batches": ppo.micro_batches})],
        "evaluate": [("evaluate.batch", config.evaluate.batch, {})],
    }
    return [batch for stage in config.stages for batch in batches.get(stage, [])]


def _check_batch(config: Config, name: str, rows: int, parts: dict[str, int]) -> None:
    factors = parts | {"mesh.data": config.mesh.data, "mesh.fsdp": config.mesh.fsdp}
    product, words = 1, []
    for factor, size in factors.items():
        product *= size
        if size > 1:
            words.append(f"config.{factor} ({size})")
    if rows % product:
        raise UserError(f"config.{name} is {rows}; it must be a multiple of {' x '.join(words)}"
                        + (f" = {product}" if len(words) > 1 else ""))


def _check_lengths(config: Config) -> None:
    """A response must leave room for a prompt before it."""
    for stage in ("revise", "compare", "ppo", "evaluate"):
        if stage in config.stages:
            tokens = getattr(config, stage).max_new_tokens
            if tokens >= config.model.max_length:
                raise UserError(f"config.{stage}.max_new_tokens is {tokens}; it must be below config.model.max_length "
                                f"({config.model.max_length}), which holds the prompt too")
    for stage in ("revise", "compare"):
        tokens = config.feedback.max_reasoning_tokens
        if stage in config.stages and config.feedback.reasoning and tokens >= config.model.max_length:
            raise UserError(f"config.feedback.max_reasoning_tokens is {tokens}; it must be below "
                            f"config.model.max_length ({config.model.max_length}), which holds the dialogue too")
    if "preference" in config.stages and config.preference.max_length > config.model.max_length:
        raise UserError(f"config.preference.max_length is {config.preference.max_length}; it must be at most "
                        f"config.model.max_length ({config.model.max_length})")


def _check_controller(config: Config) -> None:
    """A step of the adaptive controller takes off at most a fifth of batch / horizon; the whole would leave nothing."""
    ppo = config.ppo
    if "ppo" in config.stages and ppo.kl_controller == "adaptive" and ppo.batch >= 5 * ppo.kl_horizon:
        raise UserError(f"config.ppo.kl_horizon is {ppo.kl_horizon}; with the adaptive controller it must be above a "
                        f"fifth of config.ppo.batch ({ppo.batch})")
