"""A verifiable reward: addition modulo 10, learnt from random weights by PPO (configs/arithmetic_grpo.py: by GRPO).

Prompts are "7+8", the wanted answer is "5"; the reward is 1 where the last number of the response is the answer, else 0.
Measured on 2 CPU cores: over the last 20 iterations seeds 0, 1, 2 had a mean reward of .94, .95, .98 at temperature 1;
under four minutes with other work beside it.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "ppo", "evaluate", "report")
    config.data.source = "arithmetic"
    config.arithmetic.modulus = 10
    config.arithmetic.held_out_share = 0.0  # A hundred facts, all to be learnt: the evaluation asks for each of them.
    config.pretrain.steps = 0  # The tokenizer is made, the weights stay random.
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
    config.ppo.entropy_coef = 0.03  # Less, and some answers are given up before they were ever tried.
    config.ppo.value_coef = 1.0
    config.ppo.optimizer.learning_rate = 1e-3
    config.ppo.optimizer.warmup_steps = 40
    config.ppo.critic_optimizer.learning_rate = 1e-3
    config.ppo.checkpoint_every = 100
    config.evaluate.prompts = 100
    config.evaluate.max_new_tokens = 2
    config.evaluate.temperature = 0.0
    return config
