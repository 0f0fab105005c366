"""Does a run fit? Compiles the steps of PPO for a TPU topology, with no TPU and no weights, and prints bytes a device.

    pip install libtpu
    JAX_PLATFORMS=cpu python benchmarks/fit.py --config=configs/real_size.py:llama31_8b_v5e16 --shape=Llama-3.1-8B \
        --topology=v5e:4x4 [--prompt=512] [--json]

Three programs of an iteration are compiled: sampling, scoring (log-probs of policy and reference, values) and the update. The
compiler says what each takes of a device: its arguments, its results less those that take the arguments' place, and what it
needs on top while it runs. `resident` is what stays on the device meanwhile and is no argument of that program: the
preference model, the reference where it is not the base, the optimizers.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

sys.path.insert(0, str(Path(__file__).parent))
from published_shapes import SHAPES, decoder  # noqa: E402

from jaxalign.config import from_config_dict  # noqa: E402
from jaxalign.models.lora import Lora, join  # noqa: E402
from jaxalign.models.model import Model  # noqa: E402
from jaxalign.models.quantised import quantise_abstract  # noqa: E402
from jaxalign.parallel.mesh import AXES  # noqa: E402
from jaxalign.parallel.sharding import Sharding  # noqa: E402
from jaxalign.records import Experience, Rollout  # noqa: E402
from jaxalign.rollout.engine import generate  # noqa: E402
from jaxalign.rollout.sampling import Sampling  # noqa: E402
from jaxalign.training.experience import make_experience  # noqa: E402
from jaxalign.training.optimizer import make_optimizer  # noqa: E402
from jaxalign.training.ppo_state import PPOSetup, abstract_ppo_state  # noqa: E402
from jaxalign.training.ppo_step import ppo_update  # noqa: E402

GB = 1e9


def device_bytes(tree) -> int:
    """What a device holds of a pytree of ShapeDtypeStructs."""
    def size(leaf):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return int(np.prod(shape)) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def _frozen(base, kind: str):
    """The base as adapters find it, sharded. A plan is made of whole kernels only."""
    if kind not in ("float32", "bfloat16"):
        raise SystemExit(f"config.lora.base is {kind!r}; a plan is made for float32 and bfloat16")
    found = quantise_abstract(base, kind)
    return jax.tree.map(lambda x, whole: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole.sharding), found, base)


def plan(args) -> dict:
    """{"resident": bytes by role, program: bytes by kind} of a device."""
    file, _, variant = args.config.partition(":")
    values = runpy.run_path(file)["get_config"](*([variant] if variant else []))
    values.model.path = values.data.train = "not read by a plan"
    config = from_config_dict(values)
    section, sizes = config.ppo, (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    devices = np.asarray(topologies.get_topology_desc(args.topology, "tpu").devices)
    sharding = Sharding(Mesh(devices[: int(np.prod(sizes))].reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3))
    of = config.lora
    lora = Lora(of.rank, of.alpha, of.targets, of.rank_stabilised, of.dora) if of.rank else None
    chosen = config.model
    architecture = decoder(
        args.shape, compute_dtype=chosen.compute_dtype, remat=chosen.remat, vocab_multiple=chosen.vocab_multiple
    )
    policy = Model(architecture, "lm", sharding, lora)
    optimizer = make_optimizer(section.optimizer, section.iterations)
    setup = PPOSetup(policy, policy.with_head("scalar"), optimizer, optimizer, section)
    state = abstract_ppo_state(setup)
    frozen = None if lora is None else _frozen(policy.base.abstract(), of.base)
    reference = policy.abstract() if frozen is None else join(frozen, policy.abstract())
    B, P, N = section.batch, args.prompt, section.max_new_tokens
    batch = lambda dtype, *shape: jax.ShapeDtypeStruct(  # noqa: E731
        shape, dtype, sharding=sharding.named(("batch",) + (None,) * (len(shape) - 1))
    )
    row, floats = batch(jnp.int32, B), batch(jnp.float32, B, N)
    rollout = Rollout(batch(jnp.int32, B, P + N), row, row, floats, batch(jnp.bool_, B))
    experience = Experience(rollout, batch(jnp.float32, B), *(floats,) * 6)
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding.replicated)
    coef = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated)
    full, critic = join(frozen, state.policy.params), join(frozen, state.critic.params)
    sampling = Sampling(N, (2,), section.temperature, section.top_k, section.top_p)
    programs = {
        "sampling": lambda: generate.lower(policy, full, batch(jnp.int32, B, P), row, key, row, sampling),
        "scoring": lambda: make_experience.lower(
            setup, False, reference, full, critic, coef, rollout, batch(jnp.float32, B)
        ),
        "update": lambda: ppo_update.lower(setup, state, experience, frozen),
    }
    roles = {
        "policy": device_bytes(state.policy.params), "critic": device_bytes(state.critic.params),
        "optimizers": device_bytes((state.policy.opt_state, state.critic.opt_state)),
        "preference model": device_bytes(setup.critic.abstract()),
        "frozen base": 0 if frozen is None else device_bytes(frozen),
        "reference": 0 if frozen is not None else device_bytes(policy.abstract()),
    }  # fmt: skip
    found = {"resident": roles | {"together": sum(roles.values())}}
    for name in filter(None, args.programs.split(",")):
        began = time.perf_counter()
        memory = programs[name]().compile().memory_analysis()
        found[name] = {
            "arguments": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes,
            "results of their own": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "compile_seconds": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        own = found[name]["temporary"] + found[name]["results of their own"]
        found[name]["peak of the run"] = own + found["resident"]["together"]
        print(f"{name}: compiled in {found[name]['compile_seconds']} s", file=sys.stderr, flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--topology", required=True, help="as in v5e:4x4")
    parser.add_argument("--prompt", type=int, default=512, help="longest prompt, in tokens")
    parser.add_argument("--programs", default="sampling,scoring,update", help="some of these; empty: what stays resident alone")
    parser.add_argument("--json", action="store_true", help="print bytes as one JSON object")
    args = parser.parse_args(argv)
    found = plan(args)
    if args.json:
        print(json.dumps({"args": vars(args), "bytes": found}))
        return 0
    for group, rows in found.items():
        print(group + ": " + ", ".join(f"{name} {x / GB:.2f}" for name, x in rows.items() if name != "compile_seconds"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
