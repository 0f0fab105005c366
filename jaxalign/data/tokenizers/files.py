"""The tokenizer settings of a Hugging Face folder: special and added tokens, begin and end ids, the chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.data.sources.jsonl import read_object
from jaxalign.errors import UserError

NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
         "generation_config.json", "chat_template.jinja")
"""The files that a tokenizer is read from, in addition to config.json; any of them may be missing."""
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json", "added_tokens.json")
_SINGLE = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """An added token, as the folder's settings declare it."""

    content: str
    special: bool


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """The settings of a folder.

    Attributes:
        folder: its path, for error messages.
        named: special tokens by role ("bos_token": "<s>"), as chat templates use them; missing roles have no token.
        other_special: additional special tokens.
        added: added tokens by id.
        settled: the roles that a file mentions, even if only to declare that there is no token.
        bos_id: the bos_token_id in generation_config.json or else config.json.
        eos_ids: the eos_token_ids in generation_config.json and config.json, in this order.
        add_bos: whether texts start with bos; None if no file says.
        legacy: whether SentencePiece adds a space after every special token, not only at the beginning of the text.
        chat_template: the Jinja source, or None.
        variables: further variables of the chat template, such as enable_thinking; no file sets them.
    """

    folder: str
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_special: tuple[str, ...] = ()
    added: Mapping[int, AddedToken] = dataclasses.field(default_factory=dict)
    settled: frozenset[str] = frozenset()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    legacy: bool = True
    chat_template: str | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def special(self) -> tuple[str, ...]:
        """Every token that these files declare special."""
        added = (token.content for token in self.added.values() if token.special)
        return tuple(dict.fromkeys((*self.named.values(), *self.other_special, *added)))


THINKING = "enable_thinking"
"""The variable with which the chat template of a reasoning model, such as Qwen3, turns its thoughts on or off."""


def thinking_variables(thinking: str) -> dict[str, Any]:
    """The variables of a chat template for "auto" (none, so that its default applies), "on" or "off"."""
    return {} if thinking == "auto" else {THINKING: thinking == "on"}


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads the settings of a folder, without the tokenizer itself.

    tokenizer_config.json takes precedence over special_tokens_map.json. A token is a string or an object with "content".

    Raises:
        UserError: a file is not JSON, or a setting is malformed.
    """
    config, names, generation, model, added = (
        read_object(folder / name) if (folder / name).is_file() else {} for name in _SETTINGS
    )
    declared = {part: value for part, value in (names | config).items() if part in _SINGLE}
    named = {part: _content(folder, part, value) for part, value in declared.items() if value is not None}
    others: list[str] = []
    for part in _LISTED:
        value = config.get(part) or names.get(part) or []
        listed = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        others += [_content(folder, part, item) for item in listed]
    ends = [_ids(folder, "eos_token_id", source.get("eos_token_id")) for source in (generation, model)]
    begins = [i for source in (generation, model) for i in _ids(folder, "bos_token_id", source.get("bos_token_id"))]
    add_bos = config.get("add_bos_token")
    return TokenizerFiles(
        str(folder),
        named,
        tuple(others),
        _added(folder, config.get("added_tokens_decoder") or {}, added, {*named.values(), *others}),
        frozenset(declared),
        begins[0] if begins else None,
        tuple(dict.fromkeys(i for ids in ends for i in ids)),
        add_bos if isinstance(add_bos, bool) else None,
        config.get("legacy") is not False,
        _chat_template(folder, config.get("chat_template")),
    )


def _content(folder: Path, part: str, value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise UserError(f"the tokenizer files in {folder} give {part} as {repr(value)[:60]}; a string, or an object with "
                        '"content", is expected')
    return content


def _ids(folder: Path, part: str, value: Any) -> tuple[int, ...]:
    """The ids that a config file gives, as one number or a list. Negative ones stand for no token and are left out."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if not isinstance(item, int) or isinstance(item, bool):
            raise UserError(f"the config files in {folder} give {part} as {repr(value)[:60]}; an id or a list of ids is "
                            "expected")
    return tuple(item for item in ids if item >= 0)


def _added(folder: Path, decoder: Any, by_content: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """Merges added_tokens_decoder (id: object) with added_tokens.json (text: id); the former takes precedence."""
    tokens = {}
    try:
        for content, number in by_content.items():
            tokens[int(number)] = AddedToken(content, content in special)
        for number, value in decoder.items():
            content = _content(folder, f"the added token {number}", value)
            marked = isinstance(value, dict) and bool(value.get("special"))
            tokens[int(number)] = AddedToken(content, marked or content in special)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"the added tokens of the tokenizer in {folder} are malformed ({type(error).__name__}: {error}); "
                        "download tokenizer_config.json and added_tokens.json again") from error
    return dict(sorted(tokens.items()))


def _chat_template(folder: Path, given: Any) -> str | None:
    """The chat template. chat_template.jinja takes precedence; in a list of named templates, "default" is used."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as text ({error}); download or copy it again") from error
    if given is None or isinstance(given, str):
        return given
    try:
        named = {item["name"]: item["template"] for item in given}
    except (TypeError, KeyError) as error:
        raise UserError(f"chat_template in {folder / 'tokenizer_config.json'} is neither a string nor a list of named "
                        "templates; fix it") from error
    if not isinstance(named.get("default"), str):
        raise UserError(f"chat_template in {folder / 'tokenizer_config.json'} has no template named 'default', only "
                        f"{', '.join(map(str, named))}; copy the one to use into chat_template.jinja")
    return named["default"]
