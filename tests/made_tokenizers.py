"""Tokenizer folders in Hugging Face layout, trained in a moment, and chat templates like those of the common families."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxalign.data.tokenizers.sentence_piece import PRINTABLE, train_tokenizer

TEXTS = [
    "the cat sat on the mat. Why did it sit there?", "A dog ran to the house, and barked!\n\nThen it slept.",
    "user assistant system model [INST] [/INST] You are a helpful assistant.", "Once upon a time there was a fox.",
    "What is 2 + 2? It is 4.", "Human: Assistant: ", "im_start im_end eot_id <think> reasoning </think> \n",
] * 8

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}
"""
QWEN3 = """{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
MARKED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def write_settings(folder: Path, template: str | None = None, **settings) -> None:
    chat = {} if template is None else {"chat_template": template}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings, **chat}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def qwen(folder: Path, template: str = CHATML) -> Path:
    """Byte-level BPE without bos; the end of a turn is eos, pad is another token; special tokens follow the base vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    library.save(str(folder / "tokenizer.json"))
    write_settings(folder, template, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>", add_bos_token=False)
    return folder


EOT = {"__type": "AddedToken", "content": "<|eot_id|>", "lstrip": False, "normalized": False, "rstrip": False,
       "single_word": False, "special": True}


def llama3(folder: Path, template: str = LLAMA3) -> Path:
    """Byte-level BPE whose special tokens come first, in an odd order (eos has id 0); texts begin with bos; no pad."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<|eot_id|>", "<|start_header_id|>", "<|begin_of_text|>", "<|end_header_id|>"]
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))]
    )
    library.save(str(folder / "tokenizer.json"))
    write_settings(folder, template, bos_token="<|begin_of_text|>", eos_token=EOT)
    return folder


def unigram(folder: Path, template: str = GEMMA, prepend: str = "never") -> Path:
    """Unigram with metaspaces; its special tokens are also pieces of the model; pad 0, eos 1, bos 2."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    library.decoder = decoders.Metaspace(prepend_scheme=prepend)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False,
        initial_alphabet=sorted({character for text in TEXTS for character in text} | set(PRINTABLE)),
    )
    library.train_from_iterator(TEXTS, trainer)
    library.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    library.save(str(folder / "tokenizer.json"))
    write_settings(folder, template, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
                   additional_special_tokens=["<start_of_turn>", "<end_of_turn>"])
    return folder


def llama2(folder: Path, template: str = MISTRAL) -> Path:
    """BPE with byte fallback, like SentencePiece: a space precedes every text; eos is the pad token."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    texts = [f" {text}".replace(" ", "\u2581").replace("\n", "") for text in TEXTS]
    library.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")  # only for training
    library.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    whole = json.loads(library.to_str())
    whole["pre_tokenizer"] = None
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < 3]
    whole["post_processor"] = json.loads(processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]).__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    write_settings(folder, template, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    return folder


def sentencepiece(folder: Path, template: str = MISTRAL, **settings) -> Path:
    """The project's own tokenizer as a SentencePiece folder, with two added tokens beyond its pieces."""
    model = train_tokenizer(TEXTS, 150, folder / "tokenizer.model")
    size = model.vocab_size
    added = {str(size + 1): {"content": "<tool>", "special": False}, str(size): {"content": "<|im_end|>", "special": True}}
    write_settings(folder, template, bos_token="<s>", eos_token="</s>", added_tokens_decoder=added, **settings)
    return folder
