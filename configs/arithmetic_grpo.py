"""GRPO with a verifiable reward: learns addition modulo 10 from random weights (configs/arithmetic_ppo.py uses PPO).

For example, the prompt is "7+8" and the expected answer "5". The reward is 1 if the last number of the response is the expected
answer, else 0. On 2 CPU cores, seeds 0, 1 and 2 reach a mean reward of .98, .99 and .95 over the last 20 iterations, sampled at
temperature 1, in one minute.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "ppo", "evaluate", "report")
    config.data.source = "arithmetic"
    config.arithmetic.modulus = 10
    config.arithmetic.held_out_share = 0.0  # Train on all hundred problems, and evaluate on each of them.
    config.pretrain.steps = 0  # Train the tokenizer only; the weights stay random.
    config.model.layers = 2
    config.model.embed = 64
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.head_dim = 16
    config.model.mlp = 192
    config.model.max_length = 16
    config.reward.source = "verifier"
    config.ppo.iterations = 500
    config.ppo.batch = 256
    config.ppo.max_new_tokens = 2
    config.ppo.temperature = 1.0
    config.ppo.missing_eos = "none"
    config.ppo.kl_coef = 0.0
    config.ppo.optimizer.learning_rate = 1e-3
    config.ppo.checkpoint_every = 100
    config.ppo.advantages = "grpo"
    config.ppo.group_size = 16
    config.ppo.whiten_advantages = False
    config.ppo.entropy_coef = 0.02  # With a smaller bonus, some answers are never sampled.
    config.evaluate.prompts = 100
    config.evaluate.max_new_tokens = 2
    config.evaluate.temperature = 0.0
    return config
