"""Compare the device memory of PPO with adapters and of PPO of all weights: by role, and by the compiler for one update.

    python benchmarks/lora_memory.py [--shape=50m|1b] [--update] [--remat] [--rank=16] [--runs=full,lora,...] [--json]

Only shapes are needed, no weights: those of Llama-3.2-1B, or of a model of 50 million weights. Resident bytes are those that a
run holds between updates: weights, optimizer states, reference, preference model. Arrays that several roles share count once,
with the policy. With --update `ppo_update` is also compiled for the default backend, without running it. Its arguments are the
trained states, the frozen base and one buffer of experience; temporary bytes are additional memory during the update. Compiling
the larger shape on a CPU takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
from common import run_main

from jaxalign.config import Optimizer, PPOConfig
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.adapters.quantised import quantise_abstract
from jaxalign.models.architecture import DecoderConfig, RopeScaling
from jaxalign.models.model import Model
from jaxalign.parallel.device_memory import stored_bytes
from jaxalign.records import AnswerRows, Experience, PackedParts, Rollout
from jaxalign.rl.arguments import UpdateArguments
from jaxalign.rl.state import PPOSetup, abstract_ppo_state
from jaxalign.rl.update import packed_update
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.packed import part_rows

LLAMA_1B = DecoderConfig(
    vocab=128256, layers=16, embed=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192, rope_base=500000.0, norm_eps=1e-5,
    tie_embeddings=True, rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
)
SHAPES = {
    "1b": LLAMA_1B,
    "50m": dataclasses.replace(LLAMA_1B, vocab=8192, layers=8, embed=640, heads=10, kv_heads=5, mlp=2560),
}
FAST = {"xla_backend_optimization_level": 0}  # Buffers do not change: they are assigned before code generation.
RUNS = {"full": None, "lora": "float32", "lora-bfloat16": "bfloat16", "lora-int8": "int8", "lora-nf4": "nf4"}


def make_setup(args, lora: LoraAdapters | None) -> PPOSetup:
    config = PPOConfig(batch=args.batch, max_new_tokens=args.response, epochs=1, minibatches=1,
                 micro_batch_tokens=args.micro_batch_tokens)
    optimizer = make_optimizer(Optimizer(), 100)
    policy = Model(dataclasses.replace(SHAPES[args.shape], compute_dtype=args.dtype, remat=args.remat), lora=lora)
    return PPOSetup(policy, policy.with_head("scalar"), optimizer, optimizer, config)


def experience(args) -> Experience:
    B, T, N = args.batch, args.prompt + args.response, args.response

    def of(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    row, floats = of(jnp.int32, B), of(jnp.float32, B, N)
    rollout = Rollout(of(jnp.int32, B, T), row, row, floats, of(jnp.bool_, B))
    return Experience(rollout, of(jnp.float32, B), *(floats,) * 6)


def plan(args) -> tuple[jax.ShapeDtypeStruct, PackedParts]:
    """Return the shapes of the order and of the packed rows of the single minibatch."""
    T = args.prompt + args.response
    rows, most = part_rows(args.batch, T, args.micro_batch_tokens)

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), jnp.int32)

    packed, own = of(most, rows, T), of(args.batch)
    return own, PackedParts(AnswerRows(packed, packed, packed, packed, own, own, of(most)), own, of())


def _bytes(tree) -> int:
    """Bytes of a pytree on a device that holds all of it."""
    return sum(stored_bytes(leaf.size, leaf.dtype) for leaf in jax.tree.leaves(tree))


def measure(args, kind: str | None) -> dict[str, dict[str, int]]:
    """Return {"resident": bytes by role, "update": bytes by kind} of one training method.

    kind: dtype of the frozen base; None trains all weights.
    """
    lora = None if kind is None else LoraAdapters(args.rank, 2.0 * args.rank, ("*",))
    setup = make_setup(args, lora)
    state = abstract_ppo_state(setup)
    frozen = None if lora is None else quantise_abstract(setup.policy.base.abstract(), kind)
    resident = {
        "policy": _bytes(state.policy.params) + (0 if lora is None else _bytes(frozen)),
        "reference": _bytes(setup.policy.abstract()),  # The initial policy; with adapters it shares the base.
        "critic": _bytes(state.critic.params),
        "preference model": _bytes(setup.critic.abstract()),
        "optimizer states": _bytes((state.policy.opt_state, state.critic.opt_state)),
    }
    found = {"resident": resident | {"together": sum(resident.values())}}
    if not args.update:
        return found
    order, packed = plan(args)
    given = UpdateArguments(setup=setup, batch=experience(args), order=order, packed=packed, frozen=frozen)
    counted = packed_update.lower(state, given).compile(FAST).memory_analysis()
    peak = counted.argument_size_in_bytes + counted.temp_size_in_bytes + counted.output_size_in_bytes
    update = {
        "arguments": counted.argument_size_in_bytes, "temporary": counted.temp_size_in_bytes,
        "peak": peak - counted.alias_size_in_bytes,
    }
    return found | {"update": update}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rank", 16), ("batch", 8), ("prompt", 128), ("response", 128), ("micro-batch-tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shape", default="50m", choices=SHAPES)
    parser.add_argument("--update", action="store_true", help="also compile the update")
    parser.add_argument("--remat", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of activations")
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated methods to compare")
    parser.add_argument("--json", action="store_true", help="print bytes as one JSON object")
    args = parser.parse_args(argv)
    found = {}
    for name in args.runs.split(","):
        found[name] = measure(args, RUNS[name])
        print(f"{name}: done", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"backend": jax.default_backend(), "args": vars(args), "bytes": found}))
        return 0
    print("| GB | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for group, roles in next(iter(found.values())).items():
        for role in roles:
            cells = " | ".join(f"{run[group][role] / 1e9:.3f}" for run in found.values())
            print(f"| {group}: {role} | {cells} |")
    return 0


if __name__ == "__main__":
    run_main(main)
