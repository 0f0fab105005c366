"""Shared parts of the PyTorch peers: flags, the model, timed trainers. Runs under the peer's Python, without jaxalign."""

import argparse
import json
import time
import warnings

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
INTEGERS = {
    "layers": 6, "dim": 256, "heads": 8, "ffn": 688, "vocab": 4096, "batch": 8, "length": 512, "prompt": 32, "new": 64,
    "queue": 512, "steps": 5,
}


def make_parser(doc):
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in INTEGERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--data", help="token ids, one JSON object per line")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    return parser


def llama_config(options, **changes):
    """A Llama with tied embeddings, as many key/value heads as query heads, and weights from N(0, 0.02^2)."""
    return LlamaConfig(
        vocab_size=options.vocab, hidden_size=options.dim, intermediate_size=options.ffn, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.heads, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0, attn_implementation="sdpa", **changes,
    )


def word_tokenizer(options):
    """A tokenizer that the trainers require; all text reaches them as ids."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, options.vocab)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), pad_token="<pad>", bos_token="<s>",
        eos_token="</s>", unk_token="<unk>",
    )


def read_rows(options):
    with open(options.data, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def settings(options, folder, **own):
    """The settings of every trainer: float32, AdamW in one fused kernel, no activation checkpointing, nothing written."""
    return {
        "output_dir": folder, "per_device_train_batch_size": options.batch, "max_steps": options.steps, "learning_rate": 1e-5,
        "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "use_cpu": True, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "report_to": [], "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True, "torch_compile": options.compile, "dataloader_pin_memory": False, "seed": 0, **own,
    }


class Clock(transformers.TrainerCallback):
    """Seconds of each step, measured from the end of the previous one so that collating the batch counts."""

    def __init__(self):
        self.step_s, self.last = [], None

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.step_s.append(now - self.last)
        self.last = now


def in_order(trainer):
    """The trainer's class with batches in the order of the data set."""

    class InOrder(trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def report(engine, step_s, **more):
    print(json.dumps({"engine": engine, "step_s": step_s, "torch": torch.__version__,
                      "transformers": transformers.__version__, "threads": torch.get_num_threads(), **more}))
