"""TRL's DPOTrainer, float32 on a CPU, on pairs given as token ids, with precomputed reference log-probs."""

import tempfile
import time

import datasets
import torch
from torch_peer import Clock, in_order, llama_config, make_parser, read_rows, report, settings, word_tokenizer
from transformers import LlamaForCausalLM
from trl import DPOConfig, DPOTrainer


def main():
    options = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    rows = read_rows(options)
    columns = {f"{name}_input_ids": [row[name] for row in rows] for name in ("prompt", "chosen", "rejected")}
    reference, clock = [], Clock()

    class Given(in_order(DPOTrainer)):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset  # The rows are already token ids.

        def get_train_dataloader(self):
            began = time.perf_counter()
            loader = super().get_train_dataloader()
            reference.append(time.perf_counter() - began)
            return loader

    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            **settings(options, folder), max_length=options.length, max_prompt_length=None, precompute_ref_log_probs=True,
            use_logits_to_keep=True, remove_unused_columns=False, beta=0.1,
        )
        trainer = Given(
            model=LlamaForCausalLM(llama_config(options)), ref_model=None, args=config,
            processing_class=word_tokenizer(options), train_dataset=datasets.Dataset.from_dict(columns), callbacks=[clock],
        )
        trainer.train()
    share = reference[0] / (len(rows) / options.batch)
    report("trl", [share + update for update in clock.step_s], update_s=clock.step_s, reference_s=share)


main()
