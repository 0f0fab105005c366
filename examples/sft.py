"""Supervised fine-tuning on prompts with responses.

    python examples/sft.py MODEL OUT --epochs=3

The loss covers only the responses. Sequences are packed into rows of a fixed length, which leaves little padding.
"""

from __future__ import annotations

import argparse

import jaxalign as ja

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red", "lemon": "yellow"}
ROWS = [
    {"prompt": f"What colour is {thing}?", "response": f"The colour of {thing} is {colour}."}
    for thing, colour in COLOURS.items()
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a language model in Hugging Face format")
    parser.add_argument("out", help="new folder for the trained model")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data")
    parser.add_argument("--row_length", type=int, default=128, help="tokens per packed row")
    parser.add_argument("--batch_rows", type=int, default=4, help="packed rows per step")
    options = parser.parse_args(argv)

    trainer = ja.SFT(
        ja.load_model(options.model),
        epochs=options.epochs,
        batch_rows=options.batch_rows,
        row_length=options.row_length,
        optimizer={"learning_rate": 1e-3},
    )
    for step in trainer.fit(ROWS * 16):
        print(f"step {step.number}: loss {step.metrics['loss']:.4f}")

    answers = ja.Sampler(trainer.policy, temperature=0.0).generate([row["prompt"] for row in ROWS], max_new_tokens=16)
    for row, answer in zip(ROWS, answers, strict=True):
        print(f"{row['prompt']} -> {answer.text.strip()!r}")
    trainer.policy.save(options.out)


if __name__ == "__main__":
    main()
