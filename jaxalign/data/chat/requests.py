"""Request templates: Jinja files that turn a request to a judge into the messages that the judge reads.

A template set is a folder with critique.jinja, revision.jinja, comparison.jinja, rating.jinja and form.json. A template writes
its messages in blocks, and ends with the beginning of the judge's own text:

    {% message "user" %}{{ principle.critique_request }}{% endmessage %}
    {% answer "assistant" %}{% endanswer %}

Values are data: template syntax in them is not interpreted. The layout of a set says how its messages become text: "chat" (the
judge's own chat template), "transcript" ("\\n\\nHuman: ..."), or "markers" (the markers of a tokenizer that jaxalign trained).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.data.chat.template import run
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.records import Exemplar, Message, Principle

KINDS: dict[str, tuple[str, ...]] = {
    "critique": ("dialogue", "response", "principle"),
    "revision": ("dialogue", "response", "principle", "critique"),
    "comparison": ("dialogue", "first", "second", "principle"),
    "rating": ("dialogue", "response", "principle"),
}
"""The variables that the template of each kind of request must contain."""
OPTIONAL = {kind: ("exemplars", *(("reasoning", "thoughts") if kind in ("comparison", "rating") else ())) for kind in KINDS}
OPTIONAL["comparison"] += ("ties",)
"""Further variables by kind. reasoning: whether the judge reasons first; thoughts: its reasoning, None until it is written;
ties: whether it may answer that neither of the answers is better."""
LAYOUTS = ("chat", "transcript", "markers")
FORM = "form.json"
_ROOT = resources.files("jaxalign") / "feedback" / "templates"


class RenderedRequest(NamedTuple):
    """A rendered request: its messages, the role under which the judge answers, and the text with which the answer begins."""

    messages: tuple[Message, ...]
    role: str
    begin: str


@dataclasses.dataclass(frozen=True, eq=False)
class TemplateSet:
    """The templates of one folder.

    Attributes:
        name: the name of a set in the package, or the path of a folder.
        layout: one of `LAYOUTS`.
        exemplars: the number of examples of critique and revision that precede a request.
        form: the other fields of form.json, which describe the judge's answers (`jaxalign.feedback.contract`).
        sources: the templates by kind.
        own_exemplars: examples for a constitution without any.
        trusted: whether the set belongs to the package. The templates of other sets are rendered in a process of their own.
    """

    name: str
    layout: str
    exemplars: int
    form: Mapping[str, Any]
    sources: Mapping[str, str]
    own_exemplars: tuple[Exemplar, ...] = ()
    trusted: bool = False

    @functools.cache  # noqa: B019 (a set lives as long as the run)
    def variables(self, kind: str) -> frozenset[str]:
        """The variables that the template of a kind contains. Raises UserError if there is no such template, or it fails."""
        return frozenset(self._run(kind, None)["names"])

    def _run(self, kind: str, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        if kind not in self.sources:
            raise UserError(f"the template set {self.name} has no {kind}.jinja, which the judge needs; add it")
        where = f"{kind}.jinja of the template set {self.name}"
        return run("request", self.sources[kind], variables, where, "a request", self.trusted)

    def render(
        self, kind: str, dialogue: Sequence[Message], principle: Principle, exemplars: Sequence[Exemplar] = (), **values: Any
    ) -> RenderedRequest:
        """Renders a request.

        Args:
            kind: one of `KINDS`.
            dialogue: the turns up to the answer that the judge assesses.
            principle: the principle.
            exemplars: the examples that precede the request.
            values: the other variables of this kind: texts, reasoning, thoughts and ties.

        Raises:
            DialogueRefused: the template called raise_exception.
            UserError: the set has no template of this kind, or it fails.
        """
        where = f"{kind}.jinja of the template set {self.name}"
        variables = {"reasoning": False, "thoughts": None} if kind in ("comparison", "rating") else {}
        variables |= {"ties": False} if kind == "comparison" else {}
        variables |= {"dialogue": dialogue, "principle": principle, "exemplars": exemplars, **values}
        rendered = self._run(kind, variables)
        rest, turns = rendered["text"], rendered["turns"]
        if rest.strip():
            raise UserError(f"{where} writes {rest.strip()[:40]!r} outside of a message block; put it between "
                            '{% message "user" %} and {% endmessage %}')
        if not turns or not turns[-1][2] or any(is_answer for _, _, is_answer in turns[:-1]):
            raise UserError(f"{where} must end with one {{% answer %}} block, where the judge's text begins; add it")
        *messages, (role, begin, _) = turns
        return RenderedRequest(tuple(Message(*turn[:2]) for turn in messages), role, begin)


def set_names() -> tuple[str, ...]:
    """The names of the sets in the package."""
    return tuple(sorted(entry.name for entry in _ROOT.iterdir() if entry.is_dir() and (entry / FORM).is_file()))


def set_files(name: str) -> list[Path]:
    """The files of a set in a folder of the user's own; empty for a set in the package."""
    folder = Path(name).expanduser()
    return [] if name in set_names() else sorted(path for path in folder.glob("*") if path.suffix in (".jinja", ".json"))


def load_set(name: str) -> TemplateSet:
    """The template set with this name, or in the folder `name`.

    Raises:
        UserError: there is no such set; form.json is malformed; or a template is not a Jinja template, has an unknown variable,
            lacks one that its kind must contain, or does not show it.
    """
    return _read_package_set(name, _ROOT / name, trusted=True) if name in set_names() else _read(name, Path(name).expanduser())


def _read(name: str, folder: Any, trusted: bool = False) -> TemplateSet:
    if not trusted and not os.path.isdir(folder):  # Unlike Path.is_dir, False also for a name that is too long.
        raise UserError(f"the template set {name} does not exist; give a folder, or one of: {', '.join(set_names())}")
    form = _read_form(name, folder)
    layout, exemplars = form.pop("layout", None), form.pop("exemplars", 0)
    if layout not in LAYOUTS:
        raise UserError(f'"layout" in {FORM} of the template set {name} is {layout!r}; it must be one of {", ".join(LAYOUTS)}')
    if not isinstance(exemplars, int) or isinstance(exemplars, bool) or exemplars < 0:
        raise UserError(f'"exemplars" in {FORM} of the template set {name} is {exemplars!r}; it must be at least 0')
    files = {kind: folder / f"{kind}.jinja" for kind in KINDS}
    try:
        sources = {kind: file.read_text("utf-8") for kind, file in files.items() if file.is_file()}
    except (OSError, ValueError) as error:
        raise UserError(f"a template of the set {name} cannot be read as text ({error}); save it as UTF-8") from None
    own_exemplars = _read_exemplars(name, folder / "exemplars.json")
    templates = TemplateSet(name, layout, exemplars, form, sources, own_exemplars, trusted)
    for kind in sources:
        _check(templates, kind)
    return templates


_read_package_set = functools.cache(_read)


def _read_form(name: str, folder: Any) -> dict[str, Any]:
    try:
        form = parse_json((folder / FORM).read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(f'the template set {name} has no {FORM}; add one with at least {{"layout": "chat"}}') from None
    except (OSError, ValueError) as error:
        raise UserError(f"{FORM} of the template set {name} is not JSON ({error}); correct it") from None
    if not isinstance(form, dict):
        raise UserError(f"{FORM} of the template set {name} is a {type(form).__name__}; an object is expected")
    return form


def _read_exemplars(name: str, file: Any) -> tuple[Exemplar, ...]:
    if not file.is_file():
        return ()
    try:
        chats = parse_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"exemplars.json of the template set {name} is not JSON ({error}); correct it") from None
    if not isinstance(chats, dict) or "system_chat" not in chats:
        raise UserError(f'exemplars.json of the template set {name} has no "system_chat"; give an object with a list of chats '
                        "there")
    return parse_exemplars(chats["system_chat"], f"the template set {name}")


def parse_exemplars(chats: Any, where: str) -> tuple[Exemplar, ...]:
    """The examples in the public format: a list of chats of six messages, from the user and the assistant in turn: question,
    answer, critique request, critique, revision request, revision.

    Raises:
        UserError: a chat has another form. where: the file, for the message.
    """
    exemplars = []
    for number, chat in enumerate(chats if isinstance(chats, list) else [chats], start=1):
        try:
            texts, roles = [turn["content"] for turn in chat], [turn["role"] for turn in chat]
            well_formed = roles == ["user", "assistant"] * 3 and all(isinstance(text, str) and text.strip() for text in texts)
        except (TypeError, KeyError):
            well_formed = False
        if not well_formed:
            raise UserError(f'chat {number} in "system_chat" of {where} is not an example of six messages with text, from user '
                            "and assistant in turn: question, answer, critique request, critique, revision request, revision; "
                            "correct or remove it")
        question, *rest = (text.strip() for text in texts)
        exemplars.append(Exemplar((Message("user", question),), *rest))
    return tuple(exemplars)


def _check(templates: TemplateSet, kind: str) -> None:
    """Checks that a template has the variables of its kind, and shows them: it is rendered with one word for each."""
    where = f"{kind}.jinja of the template set {templates.name}"
    used = templates.variables(kind)
    known = (*KINDS[kind], *OPTIONAL[kind])
    unknown = sorted(used - set(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{where} has the variable {unknown[0]!r}; it must be one of {', '.join(known)}{hint}")
    missing = [name for name in KINDS[kind] if name not in used]
    if missing:
        raise UserError(f"{where} does not contain {{{{ {missing[0]} }}}}, which the judge needs; add it")
    words = {name: f"probe-{name}" for name in KINDS[kind] if name not in ("dialogue", "principle")}
    dialogue = (Message("user", "probe-dialogue"),)
    principle = Principle("probe-name", *(["probe-principle"] * 3))
    cases = [{}] if kind in ("critique", "revision") else [{}, {"reasoning": True}]
    cases += [{"reasoning": True, "thoughts": "probe-thoughts"}] if "thoughts" in used else []
    if "exemplars" in used:  # An example must not fail later, when a request has some.
        templates.render(kind, dialogue, principle, [Exemplar(dialogue, *(["probe-example"] * 5))], **words)
    cases += [case | {"ties": True} for case in cases] if "ties" in used else []
    for case in cases:
        request = templates.render(kind, dialogue, principle, **words, **case)
        text = "\n".join([*(message.content for message in request.messages), request.begin])
        shown = ("probe-dialogue", "probe-principle", *words.values(), *([case["thoughts"]] if "thoughts" in case else []))
        hidden = next((word for word in shown if word not in text), None)
        if hidden is not None:
            name = hidden.removeprefix("probe-")
            raise UserError(f"{where} does not show {{{{ {name} }}}} in every request; write it outside of conditions")

