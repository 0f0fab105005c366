"""TRL's SFTTrainer with its packing on, float32 on a CPU, on documents given as token ids."""

import tempfile

import datasets
import torch
from torch_peer import Clock, llama_config, make_parser, read_rows, report, settings, word_tokenizer
from transformers import LlamaForCausalLM
from trl import SFTConfig, SFTTrainer


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--packing", default="wrapped", choices=("wrapped", "bfd"), help="wrapped fills rows completely; bfd "
                        "keeps documents whole and arranges a batch as one long row")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = read_rows(options)
    columns = {"input_ids": [row["ids"] for row in rows], "completion_mask": [[int(w) for w in row["weights"]] for row in rows]}
    tokens, clock = [], Clock()

    class Counted(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            mask = inputs.get("attention_mask")  # Without a mask there is no padding.
            tokens.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
            return super().compute_loss(model, inputs, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            **settings(options, folder), max_length=options.length, packing=True, packing_strategy=options.packing,
            completion_only_loss=True,
        )
        trainer = Counted(
            model=LlamaForCausalLM(llama_config(options)), args=config, processing_class=word_tokenizer(options),
            train_dataset=datasets.Dataset.from_dict(columns), callbacks=[clock],
        )
        trainer.train()
    report("trl", clock.step_s, tokens=tokens, packing=options.packing)


main()
