"""PPO of all weights of Llama-3.1-8B on eight H100, from a file of preferences.

For 8 x H100 of 80 GB:

    python -m jaxalign.train --config=configs/llama31_8b_h100x8.py \
        --config.model.path=FOLDER --config.data.train=FILE.jsonl.gz

FOLDER is that of Llama-3.1-8B with a chat template; FILE has preferences (chosen / rejected). Never run so far: no such
device was at hand. Resident on each device by the plan of its shapes
(benchmarks/fit.py --config=configs/llama31_8b_h100x8.py --shape=Llama-3.1-8B --topology=v5p:2x2x2 --programs=):
31.08 GB, all in float32: policy 4.02, critic 3.75, their optimizers 15.54, preference model 3.75, reference 4.02.
What sampling, scoring and update need on top is what that program compiles without `--programs=`; it has not been compiled.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("sft", "preference", "ppo", "evaluate", "report")

    config.mesh.fsdp = 8
    config.model.source = "huggingface"
    config.model.path = ""  # The folder of Llama-3.1-8B.
    config.model.max_length = 768
    config.model.compute_dtype = "bfloat16"
    config.model.remat = True

    config.sft.batch_rows = 16
    config.data.source = "preferences_jsonl"
    config.data.train = ""
    config.data.style = "chat"

    config.sft.row_length = 768
    config.sft.optimizer.learning_rate = 1e-5
    config.preference.max_length = 768
    config.preference.batch = 16
    config.preference.micro_batches = 2
    config.preference.optimizer.learning_rate = 5e-6

    config.ppo.iterations = 200
    config.ppo.batch = 64
    config.ppo.minibatches = 2
    config.ppo.micro_batches = 4
    config.ppo.max_new_tokens = 256
    config.ppo.optimizer.learning_rate = 1e-6
    config.ppo.critic_optimizer.learning_rate = 5e-6

    config.evaluate.prompts = 256
    config.evaluate.batch = 64
    config.evaluate.max_new_tokens = 256
    config.evaluate.win_rate_prompts = 0  # Its judge speaks the embedded world's markers.
    return config
