"""LoRA PPO of Llama-3.1-8B on a v5e-16 slice, from a file of preferences.

For 16 v5e chips of 16 GB, four hosts:

    python -m jaxalign.train --config=configs/llama31_8b_v5e16.py \
        --config.model.path=FOLDER --config.data.train=FILE.jsonl.gz

FOLDER is that of Llama-3.1-8B with a chat template; FILE has preferences (chosen / rejected). Never run so far: no such
device was at hand. Resident on each device by the plan of its shapes
(benchmarks/fit.py --config=configs/llama31_8b_v5e16.py --shape=Llama-3.1-8B --topology=v5e:4x4 --programs=):
1.79 GB: bfloat16 base 1.00, adapters of policy, critic and preference model 0.33, their optimizers 0.45.
What sampling, scoring and update need on top is what that program compiles without `--programs=`; it has not been compiled.
Several hosts are not started by this version yet: the mesh is planned, the run is not possible before they are.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("sft", "preference", "ppo", "evaluate", "report")

    config.mesh.fsdp = 16
    config.model.source = "huggingface"
    config.model.path = ""  # The folder of Llama-3.1-8B.
    config.model.max_length = 768
    config.model.compute_dtype = "bfloat16"
    config.model.remat = True

    config.lora.rank = 16
    config.lora.base = "bfloat16"

    config.sft.batch_rows = 16
    config.data.source = "preferences_jsonl"
    config.data.train = ""
    config.data.style = "chat"

    config.sft.row_length = 768
    config.sft.optimizer.learning_rate = 2e-4
    config.preference.max_length = 768
    config.preference.batch = 16
    config.preference.micro_batches = 1
    config.preference.optimizer.learning_rate = 1e-4

    config.ppo.iterations = 200
    config.ppo.batch = 64
    config.ppo.minibatches = 2
    config.ppo.micro_batches = 2
    config.ppo.max_new_tokens = 256
    config.ppo.optimizer.learning_rate = 3e-5
    config.ppo.critic_optimizer.learning_rate = 1e-4

    config.evaluate.prompts = 256
    config.evaluate.batch = 64
    config.evaluate.max_new_tokens = 256
    config.evaluate.win_rate_prompts = 0  # Its judge speaks the embedded world's markers.
    return config
