"""The requests of the template set "chat", character by character, through the chat templates of five families."""

from __future__ import annotations

import pytest

from jaxalign.data.chat.requests import load_set
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.feedback.writer import RequestWriter
from jaxalign.records import Message, Principle

PRINCIPLE = Principle("kind", "Where is it rude?", "Make it polite.", "Which is kinder?")
DIALOGUE = (Message("user", "Why?"),)
SYSTEM = Message("system", "Be brief.")

# A user's turn, the assistant's turn, and the beginning of the judge's answer. {} is the text of a turn. A tokenizer like
# SentencePiece writes a space after a special token.
TURNS = {
    "llama3": ("<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
               "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
               "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "qwen2": ("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n", "<|im_start|>assistant\n"),
    "qwen3": ("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n", "<|im_start|>assistant\n"),
    "gemma": ("<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n", "<start_of_turn>model\n"),
    "mistral": (" [INST] {} [/INST]", " {}</s>", ""),
}
BOS = {"llama3": "<|begin_of_text|>", "qwen2": "", "qwen3": "", "gemma": "<bos>", "mistral": "<s>"}
NO_THOUGHTS = {"qwen3": "<think>\n\n</think>\n\n"}

CRITICISE = "Where is it rude?\n\nWrite only this critique of your last answer, in a few sentences."
REVISE = "Make it polite.\n\nWrite only the new answer, without an introduction or a comment."
COMPARE = """Here is a conversation between a user and an assistant, followed by two possible answers to its last message.

[Conversation]
User: Why?

[Answer A]
It is 4.

[Answer B]
Go away!

[Question]
Which is kinder?

"""
CHOOSE = COMPARE + "Reply with the letter of the better answer, A or B, and nothing else."
REASON = COMPARE + ('Compare the two answers in a few sentences. Then write a last line that reads "Better answer: A" or '
                    '"Better answer: B".')
JUDGE = """Here is a conversation between a user and an assistant, followed by the assistant's answer to its last message.

[Conversation]
User: Why?

[Answer]
Go away!

[Question]
Where is it rude?

"""
RATE = JUDGE + "Rate the answer with a number from 1 (worst) to 10 (best). Reply with the number and nothing else."
REASON_RATE = JUDGE + ('Assess the answer in a few sentences. Then write a last line that reads "Rating: " and a number from 1 '
                       "(worst) to 10 (best).")
PAIR = {"first": "It is 4.", "second": "Go away!"}
# kind, variables, the turns of the request, the text with which the judge's answer begins, whether it may think first.
REQUESTS = {
    "critique": ("critique", {"response": "Go away!"}, ("Why?", "Go away!", CRITICISE), "", True),
    "revision": ("revision", {"response": "Go away!", "critique": "All of it."},
                 ("Why?", "Go away!", CRITICISE, "All of it.", REVISE), "", True),
    "comparison": ("comparison", PAIR, (CHOOSE,), "", False),
    "reasoning": ("comparison", PAIR | {"reasoning": True}, (REASON,), "", True),
    "verdict": ("comparison", PAIR | {"reasoning": True, "thoughts": "A helps."}, (REASON,), "A helps.\n\nBetter answer:",
                True),
    "rating": ("rating", {"response": "Go away!"}, (RATE,), "", False),
    "rating_reasoning": ("rating", {"response": "Go away!", "reasoning": True}, (REASON_RATE,), "", True),
    "rating_verdict": ("rating", {"response": "Go away!", "reasoning": True, "thoughts": "It is rude."}, (REASON_RATE,),
                       "It is rude.\n\nRating:", True),
}


def writer_of(tokenizer, max_length=10_000):
    return RequestWriter(load_set("chat"), tokenizer, max_length)


def ask(tokenizer, kind, dialogue=DIALOGUE, **values):
    return writer_of(tokenizer).write(kind, dialogue, PRINCIPLE, 1, **values).ids


def text_of(tokenizer, ids):
    """Every character of the ids, with special tokens by name."""
    return "".join(tokenizer.piece(i) for i in ids)


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_request_through_every_chat_template(chat_tokenizers, name, request_name):
    tokenizer, (user, assistant, begin) = chat_tokenizers[name], TURNS[name]
    kind, values, turns, started, thinks = REQUESTS[request_name]
    written = [(assistant if i % 2 else user).format(turn) for i, turn in enumerate(turns)]
    expected = BOS[name] + "".join(written) + begin + ("" if thinks else NO_THOUGHTS.get(name, "")) + started
    assert text_of(tokenizer, ask(tokenizer, kind, **values)) == expected


def test_a_critique_request_of_llama_3_in_full(chat_tokenizers):
    tokenizer = chat_tokenizers["llama3"]
    assert text_of(tokenizer, ask(tokenizer, "critique", (SYSTEM, *DIALOGUE), response="Go away!")) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nGo away!<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhere is it rude?\n\n"
        "Write only this critique of your last answer, in a few sentences.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_a_verdict_without_reasoning_of_qwen3_in_full(chat_tokenizers):
    tokenizer, dialogue = chat_tokenizers["qwen3"], (SYSTEM, Message("user", "Hi"), Message("assistant", "Yes?"), *DIALOGUE)
    assert text_of(tokenizer, ask(tokenizer, "comparison", dialogue, **PAIR)) == (
        "<|im_start|>user\nHere is a conversation between a user and an assistant, followed by two possible answers to its "
        "last message.\n\n[Conversation]\nSystem: Be brief.\n\nUser: Hi\n\nAssistant: Yes?\n\nUser: Why?\n\n[Answer A]\n"
        "It is 4.\n\n[Answer B]\nGo away!\n\n[Question]\nWhich is kinder?\n\nReply with the letter of the better answer, A or "
        "B, and nothing else.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_thoughts_of_a_reasoning_model_precede_its_verdict(chat_tokenizers):
    tokenizer = chat_tokenizers["qwen3"]
    ids = ask(tokenizer, "comparison", **PAIR, reasoning=True, thoughts="<think>\nHm.\n</think>\n\nA helps.")
    assert text_of(tokenizer, ids).endswith(
        "<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nA helps.\n\nBetter answer:")


def test_gemma_refuses_a_system_turn_as_a_turn_and_reads_it_as_text(chat_tokenizers):
    tokenizer = chat_tokenizers["gemma"]
    with pytest.raises(DialogueRefused, match="System role not supported"):
        ask(tokenizer, "critique", (SYSTEM, *DIALOGUE), response="Go away!")
    assert "\n[Conversation]\nSystem: Be brief.\n\nUser: Why?\n\n[Answer A]\n" in text_of(
        tokenizer, ask(tokenizer, "comparison", (SYSTEM, *DIALOGUE), **PAIR))
