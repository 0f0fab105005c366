"""A reward model from pairs of answers (Bradley-Terry), saved as a sequence classifier.

    python examples/reward_model.py MODEL OUT

--members=3 trains an ensemble of three models. To use the result in PPO, pass the trained `ja.RewardModel` as `reward`.
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
    parser.add_argument("--epochs", type=int, default=8, help="passes over the pairs")
    parser.add_argument("--members", type=int, default=1, help="number of reward models in the ensemble")
    options = parser.parse_args(argv)

    reward = ja.RewardModel(
        ja.load_model(options.model),
        epochs=options.epochs,
        batch=4,
        members=options.members,
        optimizer={"learning_rate": 1e-4},
    )
    for step in reward.fit(PAIRS):
        print(f"step {step.number}: loss {step.metrics['loss']:.4f}, accuracy {step.metrics['accuracy']:.2f}")

    prompts = [pair["prompt"] for pair in PAIRS]
    for name in ("chosen", "rejected"):
        scores = reward.score(prompts, [pair[name] for pair in PAIRS])
        print(f"{name}: mean score {scores.mean():.3f}")
    reward.save(options.out)


if __name__ == "__main__":
    main()
