"""Display of tokens in a terminal."""

from __future__ import annotations

from jaxalign.tracking.tokens import GIVEN, LEARNT, SCORED, TokenRow, columns, legend, show


class Names:
    """A tokenizer whose tokens are letters; 0 is special."""

    special_ids = frozenset([0])
    texts = ("end", "a", "漢", "\n", "b c", "")

    def piece(self, token):
        return self.texts[token]


def test_marks_are_under_their_tokens_and_lines_break_with_the_text():
    row = TokenRow("x", [1, 2, 3, 4, 0], GIVEN + LEARNT + GIVEN + SCORED + LEARNT, ("cut from 9 to 5",))
    assert show(row, Names(), False).split("\n") == [
        "x: 5 tokens, 2 trained on, score at 1, cut from 9 to 5", "a│漢│↵", "  ^^", "b·c│«end»", "*** ^^^^^",
    ]


def test_a_token_without_text_is_visible():
    assert show(TokenRow("x", [5], GIVEN), Names(), False).split("\n")[1] == "''"


def test_ids_are_listed_with_their_positions():
    lines = show(TokenRow("x", [1, 0], GIVEN + LEARNT), Names(), False, ids=True).split("\n")
    assert lines[1:] == ["     0        1     a", "     1        0  ^  «end»"]


def test_colour_replaces_underlining():
    shown = show(TokenRow("x", [1, 4], GIVEN + LEARNT), Names(), True)
    assert "\x1b[32mb·c\x1b[0m" in shown and "^" not in shown
    assert "\x1b[32mtrained on" in legend(True) and "\x1b" not in legend(False)


def test_long_rows_are_wrapped_at_the_width():
    lines = show(TokenRow("x", [4] * 60, LEARNT * 60), Names(), False).split("\n")[1:]
    assert max(map(columns, lines)) <= 100 and sum(line.count("b·c") for line in lines) == 60
