"""PPO of models of real size from a file of preferences: one variant for each model and its hardware.

    python -m jaxalign.train --config=configs/real_size.py:VARIANT \
        --config.model.path=FOLDER --config.data.train=FILE.jsonl.gz

FOLDER is that of the model, with a chat template; FILE has preferences (chosen / rejected). None has been run: no such
device was at hand. GB are those that stay on each device between the steps of PPO, by a plan of the shapes: base or
policy and reference, critic, preference model, optimizers. What sampling, scoring and update need on top has not been compiled.

| variant | model | hardware | trains | mesh | GB resident |
|---|---|---|---|---|---|
| qwen3_0_6b | Qwen3-0.6B | one device of 16 GB | LoRA, bfloat16 base | one device | 1.47 |
| llama32_1b | Llama-3.2-1B | one device of 16 GB | LoRA, bfloat16 base | one device | 2.79 |
| gemma2_9b | Gemma-2-9B | a v5e-8 host, 16 GB a chip | LoRA, bfloat16 base | fsdp 8 | 3.41 |
| llama31_8b_h100x8 | Llama-3.1-8B | 8 x H100 of 80 GB | all weights, float32 | fsdp 8 | 31.08 |
| llama31_8b_v5e16 | Llama-3.1-8B | v5e-16, 16 GB a chip | LoRA, bfloat16 base | fsdp 16 | 1.79 |
| llama31_70b_v5p128 | Llama-3.1-70B | v5p-128: 64 chips of 95 GB | LoRA, bfloat16 base | fsdp 8, tensor 8 | 2.93 |

The last two run on several hosts, which docs/hosts.md says how to start. Each figure is by

    python benchmarks/fit.py --config=configs/real_size.py:VARIANT --shape=MODEL --topology=TPU --programs=

with the topology v5e:2x2 for one device, v5e:2x4, v5p:2x2x2 in place of 8 GPUs, v5e:4x4 and v5p:4x4x4.
"""

from jaxalign.config import default_config

# data, fsdp, tensor; rows of a PPO batch; parts of a minibatch; whether all weights are trained.
VARIANTS = {
    "qwen3_0_6b": ((1, 1, 1), 32, 8, False),
    "llama32_1b": ((1, 1, 1), 32, 8, False),
    "gemma2_9b": ((1, 2, 4), 64, 4, False),
    "llama31_8b_h100x8": ((1, 8, 1), 64, 4, True),
    "llama31_8b_v5e16": ((1, 4, 4), 64, 2, False),
    "llama31_8b_v6e64": ((1, 16, 4), 64, 2, True),
    "llama31_70b_v5p128": ((1, 8, 8), 64, 4, False),
}


def get_config(variant="qwen3_0_6b"):
    if variant not in VARIANTS:
        raise ValueError(f"{variant!r} is not a variant; choose one of {', '.join(VARIANTS)}")
    mesh, rows, parts, whole = VARIANTS[variant]
    config = default_config()
    config.stages = ("sft", "preference", "ppo", "evaluate", "report")
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh

    config.model.source = "huggingface"
    config.model.path = ""
    config.model.max_length = 768
    config.model.compute_dtype = "bfloat16"
    config.model.remat = True
    if not whole:
        config.lora.rank = 16
        config.lora.base = "bfloat16"

    config.data.source = "preferences_jsonl"
    config.data.train = ""
    config.data.style = "chat"

    config.sft.row_length = 768
    config.sft.batch_rows = max(4, mesh[1])
    config.sft.optimizer.learning_rate = 1e-5 if whole else 2e-4

    config.preference.max_length = 768
    config.preference.batch = 16
    config.preference.micro_batches = 16 // max(2, mesh[1])
    config.preference.optimizer.learning_rate = 5e-6 if whole else 1e-4

    config.ppo.iterations = 200
    config.ppo.batch = rows
    config.ppo.minibatches = 2
    config.ppo.micro_batches = parts
    config.ppo.max_new_tokens = 256
    config.ppo.optimizer.learning_rate = 1e-6 if whole else 3e-5
    config.ppo.critic_optimizer.learning_rate = 5e-6 if whole else 1e-4

    config.evaluate.prompts = 256
    config.evaluate.batch = rows
    config.evaluate.max_new_tokens = 256
    config.evaluate.win_rate_prompts = 0  # Its judge speaks the embedded world's markers.
    return config
