"""PPO of full-size models on a preference file: one variant for each model and its hardware.

    python -m jaxalign.train --config=configs/real_size.py:VARIANT \
        --config.model.path=FOLDER --config.data.train=FILE.jsonl.gz

FOLDER is the model's folder, with a chat template; FILE has preferences (chosen / rejected). Only llama32_1b has been run, with
random weights and few steps (docs/gpus.md).

The table has GB per device, for prompts of 512 tokens. "plan" is the highest peak of the run as computed by the plan, without
compiling. "resident" is the memory that stays in use between the steps of PPO: base model or policy and reference, critic,
preference model, optimizers. The last three columns are peaks reported by the TPU compiler (libtpu 0.0.52, jax 0.10.2),
including the resident memory. "moved" is the highest peak of moving the weights, one by one, to their placement for sampling
("-": nothing is moved). "sampling" and "update" are the peaks of these two programs. LoRA adapts a bfloat16 base model; "all"
trains all weights in float32.

| variant | model | hardware | trains | mesh | plan | resident | moved | sampling | update |
|---|---|---|---|---|---|---|---|---|---|
| qwen3_0_6b | Qwen3-0.6B | one device of 16 GB | LoRA | one device | 7.2 | 1.52 | - | 7.41 | 2.35 |
| llama32_1b | Llama-3.2-1B | one device of 16 GB | LoRA | one device | 5.3 | 2.83 | - | 5.28 | 3.71 |
| gemma2_9b | Gemma-2-9B | a v5e-8 host, 16 GB per chip | LoRA | fsdp 2, tensor 4 | 12.4 | 2.88 | 8.05 | 12.39 | 6.54 |
| llama31_8b_h100x8 | Llama-3.1-8B | 8 x H100 of 80 GB | all | fsdp 8 | 61.9 | 31.08 | 49.27 | 50.38 | 56.72 |
| llama31_8b_v5e16 | Llama-3.1-8B | v5e-16, 16 GB per chip | LoRA | fsdp 4, tensor 4 | 6.4 | 1.34 | 5.64 | 6.57 | 4.56 |
| llama31_8b_v6e64 | Llama-3.1-8B | 64 x v6e of 32 GB | all | fsdp 16, tensor 4 | 8.8 | 3.89 | 8.19 | 8.47 | 6.64 |
| llama31_70b_v5p128 | Llama-3.1-70B | 64 x v5p of 95 GB | LoRA | fsdp 8, tensor 8 | 25.4 | 3.04 | 24.85 | 23.01 | 5.37 |

The figures of the TPU compiler for llama31_8b_v6e64 and llama31_70b_v5p128 are those of commit 5b445c2f, when PPO's
micro-batches had one row per device, and its batches 64 rows. The last three variants run on several hosts (docs/hosts.md).
MODEL is the name in the second column, in lower case for gemma-2-9b. This command computes a row:

    python -m jaxalign.plan --config=configs/real_size.py:VARIANT --shape=MODEL --topology=TPU --prompt=512 --compile

The topologies are v5e:1x1 for one device, v5e:2x4, v5p:2x2x2 in place of 8 GPUs, v5e:4x4, v6e:8x8 and v5p:4x4x4. At commit
5b445c2f the 70B got the mesh data 8, tensor 8 with --search. Nothing is moved on that mesh, and the compiler's peaks were
22.57 for sampling and 24.33 for the update (plan: 22.8).

The same figures of the GPU compiler (jax-cuda12-plugin 0.10.2, cuDNN 9.28, without autotuning). "checks" is the peak of the
checks of step 0. All programs fit in the 78.27 GB of an H100 that are available (docs/compiled.md):

| variant | topology | plan | resident | moved | sampling | checks | update | seconds |
|---|---|---|---|---|---|---|---|---|
| qwen3_0_6b | h100:1x1 | 5.7 | 1.52 | - | 5.57 | 2.56 | 2.44 | 110 |
| llama32_1b | h100:1x1 | 6.2 | 2.83 | - | 6.15 | 4.13 | 4.35 | 306 |
| gemma2_9b | h100:1x8 | 14.4 | 2.88 | 8.12 | 14.37 | 6.63 | 6.85 | 303 |
| llama31_8b_h100x8 | h100:1x8 | 61.9 | 31.08 | 48.79 | 61.91 | 52.29 | 55.48 | 281 |
| llama31_8b_v5e16 | h100:2x8 | 9.3 | 1.34 | 5.64 | 9.36 | 4.09 | 4.01 | 136 |
| llama31_8b_v6e64 | h100:8x8 | 11.8 | 3.89 | 8.19 | 11.81 | 7.97 | 8.32 | 96 |
| llama31_70b_v5p128 | h100:8x8 | 25.4 | 3.04 | 24.85 | 21.78 | 13.02 | 13.03 | 66 |

llama31_8b_h100x8 recomputes only attention scores, norms and activations (model.remat_saves=products); the other variants
recompute whole layers. The peaks are those of commit 7c6f90a7.
"seconds" is the time of the whole command at commit 78db2f15, on two cores that were shared with other work. Alone, that of
llama31_8b_h100x8 takes 74 to 85 s, and a second plan with the kept reports 14 s.

By the plan all updates on the hardware of the first table are compute-bound, except SFT of qwen3_0_6b (device memory) and all
updates of llama31_8b_v6e64 (network; PPO's update takes 1.8 s, of which computing needs 1.6): 64 chips share few rows, and
--search finds no faster mesh. On several hosts of 8 GPUs the variants are network-bound.
"""

from jaxalign.config import default_config

# (data, fsdp, tensor), rows of a PPO batch, rows of a micro-batch per device, whether all weights are trained, remat_saves.
VARIANTS = {
    "qwen3_0_6b": ((1, 1, 1), 32, 2, False, "nothing"),
    "llama32_1b": ((1, 1, 1), 32, 2, False, "nothing"),
    "gemma2_9b": ((1, 2, 4), 64, 8, False, "nothing"),
    "llama31_8b_h100x8": ((1, 8, 1), 64, 8, True, "products"),
    "llama31_8b_v5e16": ((1, 4, 4), 64, 8, False, "nothing"),
    "llama31_8b_v6e64": ((1, 16, 4), 256, 8, True, "nothing"),
    "llama31_70b_v5p128": ((1, 8, 8), 128, 8, False, "nothing"),
}


def get_config(variant="qwen3_0_6b"):
    if variant not in VARIANTS:
        raise ValueError(f"{variant!r} is not a variant; choose one of {', '.join(VARIANTS)}")
    mesh, rows, at_once, whole, saves = VARIANTS[variant]
    config = default_config()
    config.stages = ("sft", "preference", "ppo", "evaluate", "report")
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh

    config.model.source = "huggingface"
    config.model.path = ""
    config.model.max_length = 768
    config.model.compute_dtype = "bfloat16"
    config.model.remat, config.model.remat_saves = True, saves
    if not whole:
        config.lora.rank = 16
        config.lora.base = "bfloat16"

    config.data.source = "preferences_jsonl"
    config.data.train = ""
    config.data.style = "chat"

    config.sft.row_length = 768
    config.sft.batch_rows = 8 * mesh[1]
    config.sft.optimizer.learning_rate = 1e-5 if whole else 2e-4

    config.preference.members = 1  # Every member's scorer is in memory during PPO.
    config.preference.max_length = 768
    config.preference.batch = 16
    config.preference.micro_batch_tokens = max(2, at_once) * config.preference.max_length
    config.preference.optimizer.learning_rate = 5e-6 if whole else 1e-4

    config.ppo.iterations = 200
    config.ppo.batch = rows
    config.ppo.minibatches = 2
    config.ppo.micro_batch_tokens = at_once * config.model.max_length
    config.ppo.max_new_tokens = 256
    config.ppo.optimizer.learning_rate = 1e-6 if whole else 3e-5
    config.ppo.critic_optimizer.learning_rate = 5e-6 if whole else 1e-4

    config.evaluate.prompts = 256
    config.evaluate.batch = rows
    config.evaluate.max_new_tokens = 256
    config.evaluate.win_rate_prompts = 0  # The labeller needs the embedded world's markers.
    return config
