"""Measure the peak host memory of loading and saving a large checkpoint, above the arrays on the devices.

    python benchmarks/checkpoint_memory.py [--gigabytes=3.2] [--folder=DIR] [--json]

A random Llama of realistic widths is written to a temporary folder (float32, in shards). Separate processes then load it, and
load and save it, on one CPU device and on eight (fsdp 4 x tensor 2). On a CPU the devices' memory is that of the process, so
its peak (ru_maxrss and VmHWM, which includes mapped files) minus the arrays on the devices is the host's share. The bound is 1
GB (1e9 bytes) above the arrays on the devices, including the interpreter and its libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxalign.models.blocks import row_blocks
from jaxalign.models.checkpoints.export import export
from jaxalign.models.checkpoints.huggingface import load_params, read_config
from jaxalign.models.checkpoints.layout import places
from jaxalign.models.checkpoints.safetensors import Planned, open_weights, plan, write_file, write_index
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import make_mesh
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.families import FAMILIES

BOUND = 1_000_000_000
MESHES = {1: (1, 1, 1), 8: (1, 4, 2)}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}


def make(folder: Path, gigabytes: float) -> int:
    """Write a random checkpoint of at least that size, and return its number of bytes."""
    folder.mkdir(parents=True)
    tables, layer = 2 * 128256 * 2048 * 4, (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) * 4
    layers = max(1, -int(-(gigabytes * 1e9 - tables) // layer))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    found = places(FAMILIES.get("llama"), Model(read_config(folder).decoder))
    shapes = {place.name(number): place.layout.stored_shape for place in found for number in place.numbers}
    kind = np.dtype(np.float32)
    planned = plan([Planned(name, shape) for name, shape in shapes.items()], kind, 1_000_000_000)
    random = np.random.default_rng(0)
    for file, tensors in planned.items():
        blocks = (
            random.standard_normal((min(4096, tensor.shape[0] - start), *tensor.shape[1:]), np.float32)
            for tensor in tensors for start in range(0, tensor.shape[0], 4096)
        )
        write_file(folder / file, tensors, kind, blocks)
    write_index(folder, planned, kind)
    return sum(tensor.bytes(kind) for tensors in planned.values() for tensor in tensors)


def child(source: Path, target: Path | None, devices: int) -> dict:
    """Load, save if there is a target, and measure this process."""
    start_rss = peak()
    shape = MESHES[devices]
    model = Model(read_config(source).decoder, "lm", Sharding(make_mesh(*shape)))
    began = time.perf_counter()
    params = jax.block_until_ready(load_params(source, model))
    loaded = time.perf_counter()
    if target is not None:
        export(target, model, params, config=read_config(source).raw, shard_bytes=1_000_000_000)
    saved = time.perf_counter()
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    found = {"devices": devices, "held": held, "before": start_rss, "maxrss": peak(), "hwm": high_water()}
    return found | {"load_s": loaded - began, "save_s": saved - loaded if target is not None else None}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def high_water() -> int | None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def same(one: Path, other: Path) -> bool:
    """Return whether two checkpoints contain the same numbers under the same names."""
    found = places(FAMILIES.get("llama"), Model(read_config(one).decoder))
    with open_weights(one) as a, open_weights(other) as b:
        return a.names == b.names and all(
            np.array_equal(a.read(place.name(number), window), b.read(place.name(number), window))
            for place in found for number in place.numbers for bounds in row_blocks(place.layout, _whole(place), 4)
            for window in [place.layout.window(bounds)]
        )


def _whole(place):
    return tuple((0, size) for size in place.layout.decoder_shape)


def run_child(source: Path, target: Path | None, devices: int) -> dict:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, __file__, "--child", str(source), str(target or ""), str(devices)]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def line(row: dict) -> str:
    gigabytes = {name: f"{(row[name] or 0) / 1e9:.3f} GB" for name in ("held", "maxrss", "hwm", "over", "before")}
    what, times = "load", f"{row['load_s']:.1f} s"
    if row["saves"]:
        what, times = "load, save", f"{times}, {row['save_s']:.1f} s"
    return (f"{what:10} {row['devices']} device(s): held {gigabytes['held']}, maxrss {gigabytes['maxrss']}, "
            f"VmHWM {gigabytes['hwm']}, over {gigabytes['over']} (the interpreter had {gigabytes['before']} before); "
            f"{times}{', numbers equal' if row.get('equal') else ''}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.2, help="minimum size of the checkpoint")
    parser.add_argument("--folder", type=Path, default=None, help="parent of the temporary folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        source, target, devices = options.child
        print(json.dumps(child(Path(source), Path(target) if target else None, int(devices))))
        return 0
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        size, rows = make(folder / "source", options.gigabytes), []
        for devices in MESHES:
            for saves in (False, True):
                target = folder / "target" if saves else None
                row = {"saves": saves, **run_child(folder / "source", target, devices)}
                row["over"] = max(row["maxrss"], row["hwm"] or 0) - row["held"]
                if saves:
                    row["equal"] = same(folder / "source", folder / "target")
                    shutil.rmtree(folder / "target")
                rows.append(row)
    finally:
        shutil.rmtree(folder)
    fine = all(row["over"] <= BOUND and row.get("equal", True) for row in rows)
    if options.json:
        print(json.dumps({"checkpoint_bytes": size, "bound_bytes": BOUND, "within_bound": fine, "runs": rows}, indent=2))
    else:
        print(f"checkpoint {size / 1e9:.2f} GB; bound: {BOUND / 1e9:.2f} GB above the arrays on the devices")
        for row in rows:
            print(line(row))
        print("within the bound" if fine else "NOT within the bound")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
