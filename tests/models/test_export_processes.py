"""A model on the devices of two processes is loaded by both and written by the first process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.processes import COMPILE_FAST

pytestmark = pytest.mark.process

_PROGRAM = """
import sys
import jax
port, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, number)
from jaxalign.models import blocks
from jaxalign.models.checkpoints.export import export
from jaxalign.models.checkpoints.huggingface import load_params, read_config
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import make_mesh
from jaxalign.parallel.sharding import Sharding
blocks.BLOCK_BYTES = 1024
config = read_config(folder + "/in", vocab_multiple=4)
model = Model(config.decoder, "lm", Sharding(make_mesh(1, 2, 2)))
params = load_params(folder + "/in", model)
assert not params["embedding"].is_fully_addressable
export(folder + "/out", model, params, config=config.raw, shard_bytes=4000)
"""
_CONFIG = {
    "model_type": "gpt_neox", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 37, "rotary_pct": 0.5, "hidden_act": "gelu",
}


@pytest.mark.slow
def test_two_processes_load_a_model_and_the_first_writes_it(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(_CONFIG))
    tensors = _tensors()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {COMPILE_FAST}", "JAX_PLATFORMS": "cpu"}
    environment = os.environ | flags | {"PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, "-c", _PROGRAM, str(port), str(number), str(tmp_path)] for number in range(2)]
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], errors
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def _tensors():
    random = np.random.default_rng(0)
    shapes = {"gpt_neox.embed_in.weight": (37, 16), "embed_out.weight": (37, 16)}
    norms = ["gpt_neox.final_layer_norm"]
    for i in range(2):
        at = f"gpt_neox.layers.{i}."
        norms += [f"{at}input_layernorm", f"{at}post_attention_layernorm"]
        for name, out, into in (("attention.query_key_value", 48, 16), ("attention.dense", 16, 16),
                                ("mlp.dense_h_to_4h", 20, 16), ("mlp.dense_4h_to_h", 16, 20)):
            shapes |= {f"{at}{name}.weight": (out, into), f"{at}{name}.bias": (out,)}
    shapes |= {f"{norm}.{part}": (16,) for norm in norms for part in ("weight", "bias")}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
