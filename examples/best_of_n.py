"""Best-of-n: sample n answers to each prompt, keep the answer with the best score, and fine-tune on the kept answers.

    python examples/best_of_n.py MODEL OUT --n=8

The script runs one round. For another round, pass OUT as MODEL, with a new OUT.
"""

from __future__ import annotations

import argparse

import numpy as np

import jaxalign as ja

PROMPTS = ["Once upon a time", "The little dog", "One day a girl", "In the garden"]


def brief(prompts: list[str], responses: list[str], **columns) -> list[float]:
    """Shorter responses score higher."""
    return [-len(response) / 100 for response in responses]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a language model in Hugging Face format")
    parser.add_argument("out", help="new folder for the trained model")
    parser.add_argument("--n", type=int, default=8, help="answers per prompt")
    parser.add_argument("--max_new_tokens", type=int, default=48, help="maximum answer length in tokens")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the chosen answers")
    options = parser.parse_args(argv)

    policy = ja.load_model(options.model)
    samples = ja.Sampler(policy, temperature=1.0).generate(PROMPTS, max_new_tokens=options.max_new_tokens, n=options.n)
    repeated = [prompt for prompt in PROMPTS for _ in range(options.n)]
    scores = np.asarray(brief(repeated, samples.texts)).reshape(len(PROMPTS), options.n)

    rows = []
    for number, (prompt, best) in enumerate(zip(PROMPTS, scores.argmax(axis=1), strict=True)):
        rows.append({"prompt": prompt, "response": samples.texts[number * options.n + best] or " "})
    print(f"mean score {scores.mean():.3f}, of the best of {options.n} {scores.max(axis=1).mean():.3f}")

    trainer = ja.SFT(policy, epochs=options.epochs, batch_rows=1, row_length=128, optimizer={"learning_rate": 1e-3})
    for step in trainer.fit(rows):
        print(f"step {step.number}: loss {step.metrics['loss']:.4f}")
    trainer.policy.save(options.out)


if __name__ == "__main__":
    main()
