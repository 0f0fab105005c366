"""LoRA PPO of Qwen3-0.6B on one device of 16 GB, from a file of preferences.

For one device (a v5e chip, a 16 GB GPU):

    python -m jaxalign.train --config=configs/qwen3_0_6b_lora.py \
        --config.model.path=FOLDER --config.data.train=FILE.jsonl.gz

FOLDER is that of Qwen3-0.6B with a chat template; FILE has preferences (chosen / rejected). Never run so far: no such
device was at hand. Resident on each device by the plan of its shapes
(benchmarks/fit.py --config=configs/qwen3_0_6b_lora.py --shape=Qwen3-0.6B --topology=v5e:2x2 --programs=):
1.47 GB: bfloat16 base 1.19, adapters of policy, critic and preference model 0.12, their optimizers 0.16.
What sampling, scoring and update need on top is what that program compiles without `--programs=`; it has not been compiled.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("sft", "preference", "ppo", "evaluate", "report")

    config.model.source = "huggingface"
    config.model.path = ""  # The folder of Qwen3-0.6B.
    config.model.max_length = 768
    config.model.compute_dtype = "bfloat16"
    config.model.remat = True

    config.lora.rank = 16
    config.lora.base = "bfloat16"

    config.data.source = "preferences_jsonl"
    config.data.train = ""
    config.data.style = "chat"

    config.sft.row_length = 768
    config.sft.optimizer.learning_rate = 2e-4
    config.preference.max_length = 768
    config.preference.batch = 16
    config.preference.micro_batches = 8
    config.preference.optimizer.learning_rate = 1e-4

    config.ppo.iterations = 200
    config.ppo.batch = 32
    config.ppo.minibatches = 2
    config.ppo.micro_batches = 8
    config.ppo.max_new_tokens = 256
    config.ppo.optimizer.learning_rate = 3e-5
    config.ppo.critic_optimizer.learning_rate = 1e-4

    config.evaluate.prompts = 256
    config.evaluate.batch = 32
    config.evaluate.max_new_tokens = 256
    config.evaluate.win_rate_prompts = 0  # Its judge speaks the embedded world's markers.
    return config
