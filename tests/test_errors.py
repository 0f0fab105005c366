"""The messages of UserError: short, in printable characters."""

from __future__ import annotations

from jaxalign.errors import UserError


def test_a_message_that_repeats_a_long_value_keeps_its_two_ends():
    text = str(UserError(f"config.a is {'x' * 100_000}; a number is expected"))
    assert text.startswith("config.a is xxx") and text.endswith("; a number is expected") and len(text) < 2000


def test_characters_that_cannot_be_printed_are_escaped():
    assert str(UserError("a\udce1b\x00\r\u202e is wrong")) == r"a\udce1b\x00\r\u202e is wrong"
    assert len(str(UserError("\ud800" * 100_000))) < 2000


def test_lines_and_text_in_any_script_stay():
    assert str(UserError("one\ntwo: é 日本 🎉")) == "one\ntwo: é 日本 🎉"
