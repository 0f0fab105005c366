"""A verifiable reward: addition modulo 10, learnt from random weights by PPO (configs/arithmetic_grpo.py: by GRPO).

Prompts are "7+8", the wanted answer is "5"; the reward is 1 where the last number of the response is the answer, else 0.
On 2 CPU cores, seeds 0, 1 and 2 reach a mean reward over the last 20 iterations of .94, .95, .98 at temperature
1, in under four minutes on a busy machine.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "ppo", "evaluate", "report")
    config.data.source = "arithmetic"
    config.arithmetic.modulus = 10
    config.arithmetic.held_out_share = 0.0  # All hundred facts are learnt; the evaluation asks for each.
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
    config.ppo.entropy_coef = 0.03  # With less, some answers are never sampled.
    config.ppo.value_coef = 1.0
    config.ppo.optimizer.learning_rate = 1e-3
    config.ppo.optimizer.warmup_steps = 40
    config.ppo.critic_optimizer.learning_rate = 1e-3
    config.ppo.checkpoint_every = 100
    config.evaluate.prompts = 100
    config.evaluate.max_new_tokens = 2
    config.evaluate.temperature = 0.0
    return config
