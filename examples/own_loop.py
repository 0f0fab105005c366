"""A custom training loop: REINFORCE with a leave-one-out baseline and a KL penalty in the loss.

    python examples/own_loop.py MODEL OUT

The library provides sampling, log-probabilities, masks, advantages and losses; this script implements the update step.
"""

from __future__ import annotations

import argparse
import functools

import jax
import numpy as np
import optax

import jaxalign as ja

PROMPTS = ["Once upon a time", "The little dog", "One day a girl", "In the garden"]


def loss(params, model, reference, rollout, advantages, kl_coef):
    """The policy-gradient loss with a KL penalty, averaged over response tokens."""
    stats = ja.responses.response_stats(model, params, rollout, temperature=1.0)
    frozen = ja.responses.response_stats(model, reference, rollout, temperature=1.0)
    mask = ja.responses.response_mask(rollout)
    tokens = ja.losses.policy_gradient(stats.logprobs, ja.advantages.broadcast_to_tokens(advantages, mask), mask)
    penalty = ja.losses.kl_loss(stats.logprobs, jax.lax.stop_gradient(frozen.logprobs), "k2", mask)
    return ja.losses.aggregate(tokens + kl_coef * penalty, mask)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a language model in Hugging Face format")
    parser.add_argument("out", help="new folder for the trained model")
    parser.add_argument("--iterations", type=int, default=20, help="number of iterations of sampling and training")
    parser.add_argument("--group_size", type=int, default=4, help="responses per prompt")
    parser.add_argument("--max_new_tokens", type=int, default=48, help="maximum response length in tokens")
    options = parser.parse_args(argv)

    policy = ja.load_model(options.model)
    reference, optimizer, sampler = policy.params, optax.adam(1e-3), ja.Sampler(policy)
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, model=policy.model, kl_coef=0.1)))
    params, state = policy.params, optimizer.init(policy.params)
    for number in range(options.iterations):
        rollout = sampler.rollout(PROMPTS, options.max_new_tokens, options.group_size)
        scores = -np.asarray(rollout.response_length, np.float32) / options.max_new_tokens
        advantages = ja.advantages.rloo(scores, options.group_size)
        value, gradients = gradient(params, reference=reference, rollout=rollout, advantages=advantages)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        sampler.update(policy.with_params(params))
        print(f"iteration {number}: score {scores.mean():.3f}, loss {float(value):.4f}")
    policy.with_params(params).save(options.out)


if __name__ == "__main__":
    main()
