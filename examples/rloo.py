"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740).

    python examples/rloo.py MODEL OUT

The baseline of a response is the mean score of the other responses to its prompt.
"""

from __future__ import annotations

import argparse

import jaxalign as ja

PROMPTS = ["Once upon a time", "The little dog", "One day a girl", "In the garden"]


def brief(prompts: list[str], responses: list[str], **columns) -> list[float]:
    """Shorter responses score higher."""
    return [-len(response) / 100 for response in responses]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a language model in Hugging Face format")
    parser.add_argument("out", help="new folder for the trained model")
    parser.add_argument("--iterations", type=int, default=20, help="number of iterations of sampling and training")
    parser.add_argument("--batch", type=int, default=16, help="responses per iteration")
    parser.add_argument("--max_new_tokens", type=int, default=48, help="maximum response length in tokens")
    options = parser.parse_args(argv)

    trainer = ja.PPO(
        ja.load_model(options.model),
        reward=brief,
        iterations=options.iterations,
        batch=options.batch,
        max_new_tokens=options.max_new_tokens,
        advantages="rloo",
        policy_loss="plain",
        group_size=4,
        epochs=1,
        minibatches=1,
        kl_coef=0.1,
    )
    for step in trainer.fit(PROMPTS):
        print(f"iteration {step.number}: score {step.metrics['score']:.3f}, KL {step.metrics['kl_k1']:.3f}")

    sampler = ja.Sampler(trainer.policy, temperature=0.7)
    for prompt, answer in zip(PROMPTS, sampler.generate(PROMPTS, max_new_tokens=options.max_new_tokens), strict=True):
        print(f"{prompt!r} -> {answer.text!r}")
    trainer.policy.save(options.out)


if __name__ == "__main__":
    main()
