"""Direct preference optimisation on pairs of answers (Rafailov et al. 2023, arXiv 2305.18290).

    python examples/dpo.py MODEL OUT --objective=ipo --beta=0.1

The reference is the initial model; its log-probabilities are computed once. docs/dpo.md lists the objectives.
"""

from __future__ import annotations

import argparse

import jaxalign as ja

PAIRS = [
    {"prompt": "Name a colour.", "chosen": "Red.", "rejected": "Seven."},
    {"prompt": "Name a number.", "chosen": "Two.", "rejected": "Green."},
    {"prompt": "Name an animal.", "chosen": "A cat.", "rejected": "A table."},
    {"prompt": "Name a fruit.", "chosen": "A plum.", "rejected": "A shoe."},
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a language model in Hugging Face format")
    parser.add_argument("out", help="new folder for the trained model")
    parser.add_argument("--objective", type=str, default="sigmoid", help="sigmoid, ipo, ..., or a sum such as sigmoid+bco_pair")
    parser.add_argument("--beta", type=float, default=0.1, help="strength of the KL to the reference")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the pairs")
    options = parser.parse_args(argv)

    trainer = ja.DPO(
        ja.load_model(options.model),
        options.objective,
        beta=options.beta,
        epochs=options.epochs,
        batch=4,
        optimizer={"learning_rate": 1e-4},
    )
    for step in trainer.fit(PAIRS):
        print(f"step {step.number}: loss {step.metrics['loss']:.4f}, accuracy {step.metrics['accuracy']:.2f}")
    trainer.policy.save(options.out)


if __name__ == "__main__":
    main()
