"""Arithmetic problems with answers, and a split without overlap."""

import pytest

from jaxalign.data.sources.generated import ArithmeticProblems
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import DATA_SOURCES


@pytest.mark.parametrize(("operations", "held_out"), [(("+",), 0.0), (("+", "-", "*"), 0.25)])
def test_every_problem_occurs_once_with_its_answer(operations, held_out):
    made = ArithmeticProblems(0, 6, operations, held_out)
    train, held = made.problems("train"), made.problems("held_out")
    assert len({*train, *held}) == len(train) + len(held) == 49 * len(operations)
    assert len(held) == round(held_out * 49 * len(operations))
    for text, answer in train + held:
        assert int(answer) == eval(text) and set(text + answer) <= set(DATA_SOURCES.get("arithmetic").alphabet)


def test_order_and_split_depend_only_on_the_seed():
    first, again, other = (ArithmeticProblems(seed, 9, ("+",), 0.1).problems("held_out") for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_prompt_has_its_answer_as_a_column():
    made = ArithmeticProblems(0, 2, ("-",), 0.0)
    prompts = made.prompts("train")
    assert len(prompts) == 9 and len({prompt.id for prompt in prompts}) == 9
    for prompt in prompts:
        (message,) = prompt.messages
        assert message.role == "user" and str(eval(message.content)) == prompt.columns["answer"]
    assert made.prompts("held_out") == []


def test_the_answer_modulo_a_number_is_the_remainder():
    problems = ArithmeticProblems(0, 9, ("+", "-"), 0.0, modulus=7).problems("train")
    assert len(problems) == 200 and all(int(answer) == eval(text) % 7 for text, answer in problems)


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(UserError, match=r"arithmetic\.held_out_share is 0\.9; of 4 problems it leaves none"):
        ArithmeticProblems(0, 1, ("+",), 0.9)
