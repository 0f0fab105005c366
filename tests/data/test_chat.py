"""Dialogues through chat templates: ids equal to those of `transformers`, masks written by hand, and no injected special
tokens."""

from __future__ import annotations

import random
import re

import pytest

from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message
from tests import made_tokenizers

FAMILIES = {
    "chatml": ("qwen", made_tokenizers.CHATML),
    "llama3": ("llama3", made_tokenizers.LLAMA3),
    "gemma": ("unigram", made_tokenizers.GEMMA),
    "mistral": ("llama2", made_tokenizers.MISTRAL),
    "qwen3": ("qwen", made_tokenizers.QWEN3),
    "marked": ("qwen", made_tokenizers.MARKED),
    "sentencepiece": ("sentencepiece", made_tokenizers.MISTRAL),
}
OF_TRANSFORMERS = tuple(name for name in FAMILIES if name != "sentencepiece")


def dialogue(*texts):
    return [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]


DIALOGUE = dialogue("Why did it sit?", "It is 4.", "assistant\n user [INST]", " the mat.\nThen it barked! ", "a", "It")
QUESTION, ANSWER = DIALOGUE[:3], DIALOGUE[3].content


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    return {name: getattr(made_tokenizers, kind)(root / name, template) for name, (kind, template) in FAMILIES.items()}


@pytest.fixture(scope="module")
def loaded(folders):
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


def theirs(folder, messages, **options):
    tokenizer = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    given = [{"role": message.role, "content": message.content} for message in messages]
    return tokenizer.apply_chat_template(given, tokenize=True, **options)


@pytest.mark.parity
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.parametrize("length", [1, 3, 5])
def test_prompt_ids_equal_those_of_transformers(folders, loaded, name, length):
    expected = theirs(folders[name], DIALOGUE[:length], add_generation_prompt=True, return_dict=False)
    assert chat.encode_prompt(loaded[name], DIALOGUE[:length]) == expected


@pytest.mark.parity
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.parametrize("length", [2, 3, 6])
def test_dialogue_ids_equal_those_of_transformers(folders, loaded, name, length):
    expected = theirs(folders[name], DIALOGUE[:length], return_dict=False)
    assert chat.encode_dialogue(loaded[name], DIALOGUE[:length])[0] == expected


@pytest.mark.parity
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_prompt_and_its_answer_equal_the_dialogue_up_to_the_end_of_the_turn(folders, loaded, name):
    tokenizer = loaded[name]
    expected = theirs(folders[name], DIALOGUE[:4], return_dict=False)
    ids = chat.encode_prompt(tokenizer, QUESTION) + chat.encode_answer(tokenizer, ANSWER)
    assert ids == expected[: len(ids)]
    assert tokenizer.decode(expected[len(ids) :]).strip() == "" and not tokenizer.special_ids & set(expected[len(ids) :])
    assert ids[-1] in tokenizer.special_ids


# For each family, the marked text by hand, with every answer of the assistant and its end in brackets.
BY_HAND = {
    "chatml": "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n<|im_start|>user\n"
              "user<|im_end|>\n<|im_start|>assistant\n⟦user<|im_end|>⟧\n",
    "marked": "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n<|im_start|>user\n"
              "user<|im_end|>\n<|im_start|>assistant\n⟦user<|im_end|>⟧\n",
    "qwen3": "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n<|im_start|>user\nuser<|im_end|>\n"
             "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nuser<|im_end|>⟧\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant"
              "<|end_header_id|>\n\n⟦It is 4.<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\nuser<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n⟦user<|eot_id|>⟧",
    "gemma": "<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n⟦It is 4.<end_of_turn>⟧\n<start_of_turn>user\n"
             "user<end_of_turn>\n<start_of_turn>model\n⟦user<end_of_turn>⟧\n",
    "mistral": "<s>[INST] Why? [/INST]⟦ It is 4.</s>⟧[INST] user [/INST]⟦ user</s>⟧",
    "sentencepiece": "<s>[INST] Why? [/INST]⟦ It is 4.</s>⟧[INST] user [/INST]⟦ user</s>⟧",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mask_of_a_dialogue_of_several_turns_is_right_token_by_token(loaded, name):
    tokenizer, marked = loaded[name], BY_HAND[name]
    ids, mask = chat.encode_dialogue(tokenizer, dialogue("Why?", "It is 4.", "user", "user"))
    text = re.sub("[⟦⟧]", "", marked)
    assert chat.render(tokenizer, dialogue("Why?", "It is 4.", "user", "user")) == text
    said, inside = [], False
    for character in marked:
        if character in "⟦⟧":
            inside = character == "⟦"
        else:
            said.append(inside)
    encoded = tokenizer.encode_template(text)
    assert encoded.ids == ids
    assert mask == [said[start] if start < len(said) else said[-1] for start, _ in encoded.spans]
    # Decode the trained parts: their only template text is the end of each turn.
    learnt = [i for i, counts in zip(ids, mask, strict=True) if counts]
    assert "".join(tokenizer.piece(i) for i in learnt) == "".join(re.findall("⟦(.*?)⟧", marked, re.DOTALL))


@pytest.mark.parity
def test_the_mask_of_generation_blocks_equals_that_of_transformers(folders, loaded):
    found = theirs(folders["marked"], DIALOGUE, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = chat.encode_dialogue(loaded["marked"], DIALOGUE)
    assert (ids, [int(counts) for counts in mask]) == (found["input_ids"], found["assistant_masks"])


@pytest.mark.parity
def test_a_template_that_removes_reasoning_from_earlier_turns(folders, loaded):
    thought = "<think>\nIt barked.\n</think>\n\nIt is 4."
    messages = dialogue("Why?", thought, "And?", thought)
    tokenizer = loaded["qwen3"]
    ids, mask = chat.encode_dialogue(tokenizer, messages)
    assert ids == theirs(folders["qwen3"], messages, return_dict=False)
    learnt = "".join(tokenizer.piece(i) for i, counts in zip(ids, mask, strict=True) if counts)
    assert learnt == "It is 4.<|im_end|>" + thought + "<|im_end|>"
    assert "".join(tokenizer.piece(i) for i in chat.encode_answer(tokenizer, thought)) == thought + "<|im_end|>"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_special_tokens_in_a_message_stay_text(loaded, name, place):
    """For every role, the number of special tokens equals that of the same dialogue without them."""
    tokenizer = loaded[name]
    specials = {tokenizer.piece(i) for i in tokenizer.special_ids}
    texts = ["Why?", "It is 4.", "And?", "the mat."]
    plain, _ = chat.encode_dialogue(tokenizer, dialogue(*texts))

    def count(ids):
        return [i for i in ids if i in tokenizer.special_ids]

    for special in sorted(specials):
        said = f"the {special}{special} cat{special[:2] + special + special[2:]}"
        changed = dialogue(*texts[:place], said, *texts[place + 1 :])
        ids, mask = chat.encode_dialogue(tokenizer, changed)
        assert count(ids) == count(plain), special
        assert special in "".join(tokenizer.piece(i) for i in ids if i not in tokenizer.special_ids)
        assert sum(i in tokenizer.special_ids for i, learnt in zip(ids, mask, strict=True) if learnt) == 2
        prompt = chat.encode_prompt(tokenizer, [*changed[:2], Message("user", said)])
        assert count(prompt) == count(chat.encode_prompt(tokenizer, dialogue(*texts[:3]))), special
        answer = chat.encode_answer(tokenizer, said)
        assert [i in tokenizer.special_ids for i in answer] == [False] * (len(answer) - 1) + [True]


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_special_tokens_do_not_merge(loaded, name):
    """Messages randomly composed of parts of special tokens, next to the template's own."""
    tokenizer, rng = loaded[name], random.Random(0)
    names = sorted({tokenizer.piece(i) for i in tokenizer.special_ids})
    parts = [*names, *(part for whole in names for part in (whole[:1], whole[:-1], whole[1:], whole[-1:])), " ", "\n", "a"]

    def count(ids):
        return [i for i in ids if i in tokenizer.special_ids]

    expected = count(chat.encode_dialogue(tokenizer, dialogue("a", "b"))[0])
    for _ in range(60):
        ask, answer = ("".join(rng.choices(parts, k=rng.randint(1, 6))) for _ in range(2))
        ids, mask = chat.encode_dialogue(tokenizer, dialogue(ask, answer))
        assert count(ids) == expected, (ask, answer)
        learnt = [i for i, counts in zip(ids, mask, strict=True) if counts]
        assert len(count(learnt)) == 1 and learnt[-1] == count(learnt)[0], (ask, answer)


@pytest.mark.parametrize("ending", ["", " ", "\n", " \n", "\n "])
@pytest.mark.parametrize("trim", ["", " | trim", ".rstrip('\\n')", ".strip()"])
def test_the_end_of_an_answer_is_found_for_any_trimming_by_the_template(tmp_path, ending, trim):
    tokenizer = template(tmp_path, made_tokenizers.CHATML.replace("message.content", f"(message.content{trim})"))
    kept = "It is 4." + ending
    kept = {"": kept, " | trim": kept.strip(), ".rstrip('\\n')": kept.rstrip("\n"), ".strip()": kept.strip()}[trim]
    answer = chat.encode_answer(tokenizer, "It is 4." + ending)
    assert "".join(tokenizer.piece(i) for i in answer) == kept + "<|im_end|>"


@pytest.mark.parametrize(("name", "stops"), [
    ("chatml", ["<|im_end|>"]), ("llama3", ["<|eot_id|>"]), ("gemma", ["<end_of_turn>", "<eos>"]), ("mistral", ["</s>"]),
])
def test_sampling_stops_at_the_end_of_a_turn_and_at_eos(loaded, name, stops):
    assert [loaded[name].piece(i) for i in chat.stop_ids(loaded[name])] == stops


def test_an_answer_can_be_empty(loaded):
    assert [loaded["chatml"].piece(i) for i in chat.encode_answer(loaded["chatml"], "")] == ["<|im_end|>"]


def test_an_answer_does_not_merge_with_the_end_of_the_prompt(loaded):
    """The prompt ends with a line break and the answer begins with two: sampling begins after the prompt's own tokens."""
    tokenizer = loaded["chatml"]
    prompt, answer = chat.encode_prompt(tokenizer, QUESTION), chat.encode_answer(tokenizer, "\n\nIt is.")
    assert "".join(tokenizer.piece(i) for i in prompt[-2:]).endswith("\n")
    assert "".join(tokenizer.piece(i) for i in answer) == "\n\nIt is.<|im_end|>"


def template(tmp_path, source):
    return load_tokenizer(made_tokenizers.qwen(tmp_path, source))


def test_a_template_whose_prompt_opens_reasoning_cannot_encode_an_answer(tmp_path):
    opened = made_tokenizers.CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    tokenizer = template(tmp_path, opened)
    assert chat.encode_prompt(tokenizer, QUESTION) and chat.stop_ids(tokenizer) == (332,)
    with pytest.raises(UserError, match=r"does not write an answered dialogue .* ends with '.*<think>\\n'"):
        chat.encode_answer(tokenizer, "It is.")
    with pytest.raises(UserError, match="the beginning of a dialogue differently .* \\(message 2 of 6\\)"):
        chat.encode_dialogue(tokenizer, DIALOGUE)


@pytest.mark.parametrize("text", ["It is</think> 4.", "<think>\nIt is.\n</think>\n\nIt is 4."])
def test_an_answer_with_the_end_of_a_thought_follows_the_empty_thought_of_its_prompt(loaded, text):
    tokenizer = loaded["qwen3"].with_variables({"enable_thinking": False})
    ids = chat.encode_prompt(tokenizer, QUESTION[:1]) + chat.encode_answer(tokenizer, text)
    prompt = f"<|im_start|>user\n{QUESTION[0].content}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    expected = f"{prompt}{text}<|im_end|>"
    assert ids == list(tokenizer.encode_template(expected).ids)


def test_a_template_without_an_end_of_turn_is_reported_in_one_sentence(tmp_path):
    tokenizer = template(tmp_path, "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}")
    with pytest.raises(UserError, match=r"puts no special token after an answer \(it continues with '\\n'\)"):
        chat.encode_answer(tokenizer, "It is.")


def test_a_template_that_looks_for_special_tokens_in_messages_is_reported_in_one_sentence(tmp_path):
    tokenizer = template(tmp_path, "{% for m in messages %}{{ m.content.replace('<|im_end|>', '') }}<|im_end|>{% endfor %}")
    assert chat.encode_prompt(tokenizer, dialogue("Why?"))
    with pytest.raises(DialogueRefused, match="depends on the text of messages.* when special tokens in it are cut"):
        chat.encode_prompt(tokenizer, dialogue("a <|im_end|> b"))


def test_a_folder_without_a_template_and_a_dialogue_without_a_question_are_reported_in_one_sentence(tmp_path, loaded):
    with pytest.raises(UserError, match="has no chat template; put chat_template.jinja there"):
        chat.encode_prompt(template(tmp_path, None), QUESTION)
    with pytest.raises(UserError, match="a prompt must end with a message to the assistant"):
        chat.encode_prompt(loaded["chatml"], DIALOGUE[:2])
    with pytest.raises(UserError, match="a character from U\\+FDD0 to U\\+FDD3"):
        chat.encode_prompt(loaded["chatml"], dialogue("a\ufdd0b"))


def test_roles_that_do_not_alternate_raise_the_error_of_the_template(loaded):
    twice = [Message("user", "a"), Message("user", "b")]
    with pytest.raises(DialogueRefused, match=r"rejects a dialogue \(roles user, user\): roles must alternate"):
        chat.encode_prompt(loaded["gemma"], twice)
    with pytest.raises(UserError, match="System role not supported"):
        chat.encode_prompt(loaded["gemma"], [Message("system", "x"), *twice])


def test_a_template_that_leaves_the_system_message_out_refuses_the_dialogue(tmp_path):
    turn = "{{ m.role }}: {{ m.content }}<|im_end|>"
    tokenizer = template(tmp_path, "{% for m in messages %}{% if m.role != 'system' %}" + turn + "{% endif %}{% endfor %}")
    assert chat.encode_prompt(tokenizer, dialogue("Be brief."))
    assert chat.encode_prompt(tokenizer, [Message("system", " "), *dialogue("Be brief.")])
    with pytest.raises(DialogueRefused, match="leaves the system message out; remove the message, or provide another"):
        chat.encode_prompt(tokenizer, [Message("system", "Be brief."), *dialogue("Be brief.")])
