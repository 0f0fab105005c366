"""Constitutional AI: fine-tune on revised answers, then optimise on AI preferences (arXiv 2212.08073).

    python examples/constitutional_ai.py MODEL OUT

The judge in this example is a small Python class, so that it works with any model. `ja.Judge(policy, CONSTITUTION)` uses a
language model as the judge instead; `python -m jaxalign.train` does this at full scale.
"""

from __future__ import annotations

import argparse

import jaxalign as ja
import jaxalign.feedback.judge as feedback

CONSTITUTION = ja.Constitution(["Be brief.", "Do not repeat yourself."])
PROMPTS = ["Name a colour.", "Name an animal.", "Describe the sea.", "Describe a tree."]


class Brevity:
    """A judge that prefers shorter answers."""

    def critique(self, requests, draw):
        return [feedback.Text(f"{len(request.response)} characters are too many.") for request in requests]

    def revise(self, requests, draw):
        return [feedback.Text(request.response[: max(1, len(request.response) // 2)]) for request in requests]

    def compare(self, requests, draw):
        return [feedback.Verdict(0.9 if len(request.first) < len(request.second) else 0.1) for request in requests]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a language model in Hugging Face format")
    parser.add_argument("out", help="new folder for the trained model")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the revisions, and over the pairs")
    parser.add_argument("--max_new_tokens", type=int, default=32, help="maximum answer length in tokens")
    options = parser.parse_args(argv)

    policy, judge = ja.load_model(options.model), ja.Judge(Brevity(), CONSTITUTION, reasoning=False)

    # Supervised phase: fine-tune on the revised answers.
    revisions = ja.revise(policy, PROMPTS, judge=judge, max_new_tokens=options.max_new_tokens)
    rows = [{"prompt": r.prompt.messages, "response": r.revision} for r in revisions if r.round and r.revision.strip()]
    sft = ja.SFT(policy, epochs=options.epochs, batch_rows=1, row_length=128)
    for step in sft.fit(rows):
        print(f"sft {step.number}: loss {step.metrics['loss']:.4f}")

    # Preference phase: the judge compares two samples for each prompt, and DPO trains on the labels.
    samples = ja.Sampler(sft.policy).generate(PROMPTS, max_new_tokens=options.max_new_tokens, n=2)
    first, second = samples.texts[::2], samples.texts[1::2]
    pairs = judge.compare(PROMPTS, first, second)
    dpo = ja.DPO(sft.policy, epochs=options.epochs, batch=2)
    for step in dpo.fit(pairs):
        print(f"dpo {step.number}: loss {step.metrics['loss']:.4f}")

    result = ja.evaluate({"base": policy, "cai": dpo.policy}, PROMPTS, judge=judge, max_new_tokens=options.max_new_tokens)
    for row in result.win_rates:
        print(f"{row['model']} against {row['against']}: {row}")
    dpo.policy.save(options.out)


if __name__ == "__main__":
    main()
