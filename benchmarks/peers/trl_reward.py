"""TRL's RewardTrainer, float32 on a CPU, on pairs given as token ids."""

import tempfile

import datasets
import torch
from torch_peer import Clock, in_order, llama_config, make_parser, read_rows, report, settings, word_tokenizer
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer


def main():
    options = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    rows, clock = read_rows(options), Clock()
    columns = {f"{name}_input_ids": [row[name] for row in rows] for name in ("chosen", "rejected")}
    with tempfile.TemporaryDirectory() as folder:
        trainer = in_order(RewardTrainer)(
            model=LlamaForSequenceClassification(llama_config(options, num_labels=1)),
            args=RewardConfig(**settings(options, folder), max_length=options.length),
            processing_class=word_tokenizer(options), train_dataset=datasets.Dataset.from_dict(columns), callbacks=[clock],
        )
        trainer.train()
    report("trl", clock.step_s)


main()
