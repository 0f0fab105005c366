"""Trains a tokenizer for ChatML dialogues, and writes the tokenizer files of a Hugging Face folder.

The tokenizer is byte-level BPE, as in GPT-2 and Qwen. `<|im_end|>` ends a turn and is the end-of-sequence token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_files(texts: Iterable[str], vocab_size: int) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json for a tokenizer trained on texts.

    Args:
        texts: the texts.
        vocab_size: the maximum size of the vocabulary; a text with few words gives fewer tokens, but at least 259.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, START, END], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    library.train_from_iterator(texts, trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": END, "pad_token": PAD,
        "add_bos_token": False, "additional_special_tokens": [START], "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    return {
        "tokenizer.json": library.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }
