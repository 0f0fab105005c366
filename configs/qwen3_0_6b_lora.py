"""DRAFT"""

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
