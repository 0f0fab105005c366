"""Tasks for lm-evaluation-harness with a few documents, as YAML files with local data."""

from __future__ import annotations

import json
import pathlib

import yaml

QUESTIONS = [
    {"question": f"What is {a} + {b}?", "choices": [f"It is {a + b}.", f"{a + b + 1}", "a cat sat on the mat"],
     "label": (a + b) % 3, "answer": f"It is {a + b}."}
    for a in range(1, 5) for b in range(1, 4)
]
TEXTS = ["the cat sat on the mat.", "A dog ran to the house, and barked!\n\nThen it slept. " * 12, "Once upon a time, a fox."]
NAMES = ("made_choice", "made_answer", "made_text")


def write_tasks(folder: pathlib.Path) -> pathlib.Path:
    """Write a multiple-choice task, a generation task and a perplexity task to `folder`, and return it."""
    folder.mkdir(parents=True)
    for name, rows in (("questions", QUESTIONS), ("texts", [{"text": text} for text in TEXTS])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def task(name: str, data: str, **fields):
        source = {"data_files": {"test": str(folder / f"{data}.jsonl")}, "cache_dir": str(folder / "cache")}
        content = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test",
                   "metadata": {"version": 2}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content | fields))

    task("made_choice", "questions", output_type="multiple_choice", doc_to_text="Question: {{question}}\nAnswer:",
         doc_to_choice="{{choices}}", doc_to_target="label", num_fewshot=2, fewshot_split="test",
         metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}])
    task("made_answer", "questions", output_type="generate_until", doc_to_text="{{question}}", doc_to_target="{{answer}}",
         generation_kwargs={"until": ["\n", "a"], "max_gen_toks": 24, "do_sample": False},
         metric_list=[{"metric": "exact_match"}])
    task("made_text", "texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
         metric_list=[{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}])
    return folder
