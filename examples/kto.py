"""KTO: learning from single answers labelled good or bad (Ethayarajh et al. 2024, arXiv 2402.01306).

    python examples/kto.py MODEL OUT

KTO needs no pairs: each row has one answer and a label.
"""

from __future__ import annotations

import argparse

import jaxalign as ja

ROWS = [
    {"prompt": "Name a colour.", "completion": "Red.", "label": True},
    {"prompt": "Name a colour.", "completion": "Seven.", "label": False},
    {"prompt": "Name a number.", "completion": "Two.", "label": True},
    {"prompt": "Name a number.", "completion": "Green.", "label": False},
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a language model in Hugging Face format")
    parser.add_argument("out", help="new folder for the trained model")
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the KL to the reference")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the rows")
    options = parser.parse_args(argv)

    trainer = ja.DPO(
        ja.load_model(options.model),
        "kto",
        beta=options.beta,
        epochs=options.epochs,
        batch=4,
        optimizer={"learning_rate": 1e-4},
    )
    for step in trainer.fit(ROWS):
        print(f"step {step.number}: loss {step.metrics['loss']:.4f}")
    trainer.policy.save(options.out)


if __name__ == "__main__":
    main()
