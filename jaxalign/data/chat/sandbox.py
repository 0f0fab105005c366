"""Compiles and renders Jinja templates. Untrusted ones are rendered in the process that `template.py` starts.

The sandbox is Jinja's immutable one: no attributes that begin with an underscore, no changes to the arguments. It does not
limit time and memory, but the process does. This module imports only Jinja, so that the process starts in less than 0.1 s.

Each kind of template has a dialect: "chat" (chat templates) or "request" (request templates).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

# Unicode noncharacters, which no text contains. They mark the blocks of a rendering and are then removed.
OPEN, CLOSE = "\ufdd2", "\ufdd3"
MAX_SECONDS = 2.0
"""The maximum processor time of one rendering."""
MAX_MEMORY = 512 * 1024**2
"""The maximum memory of the process, in bytes."""
MAX_BYTES = 16_000_000
"""The maximum length of a reply, in bytes."""
_MAX_MESSAGE = 300
_TOO_MUCH_MEMORY = f"exceeds a limit: it takes more than {MAX_MEMORY // 1024**2} MB of memory; fix it"


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: the template's own tags around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        return OPEN + caller() + CLOSE


class _MessageBlocks(jinja2.ext.Extension):
    """`{% message ROLE %}...{% endmessage %}` and `{% answer [ROLE] %}...{% endanswer %}` append to the variable `_turns`."""

    tags = {"message", "answer"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser):
        token = next(parser.stream)
        default = jinja2.nodes.Const("assistant")
        has_role = token.value == "message" or not parser.stream.current.test("block_end")
        role = parser.parse_expression() if has_role else default
        body = parser.parse_statements([f"name:end{token.value}"], drop_needle=True)
        arguments = [jinja2.nodes.ContextReference(), role, jinja2.nodes.Const(token.value == "answer")]
        return jinja2.nodes.CallBlock(self.call_method("_add", arguments), [], [], body).set_lineno(token.lineno)

    def _add(self, context, role: Any, is_answer: bool, caller) -> str:
        context["_turns"].append((str(role), caller(), is_answer))
        return ""


def _raise_exception(message: str) -> None:
    """The function of this name that templates may call."""
    raise _Refused(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON, as in `transformers`; Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment(dialect: str) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    own, undefined = (_Generation, jinja2.Undefined) if dialect == "chat" else (_MessageBlocks, jinja2.StrictUndefined)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=undefined, extensions=[own, jinja2.ext.loopcontrols])
    environment.globals["raise_exception"] = _raise_exception
    if dialect == "chat":
        environment.filters["tojson"] = _to_json
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


@functools.lru_cache(maxsize=64)
def _compiled(dialect: str, source: str) -> jinja2.Template:
    return _environment(dialect).from_string(source)


def answer(dialect: str, source: str, variables: Mapping[str, Any] | None, about: str) -> dict[str, Any]:
    """Renders a template, or finds its variables.

    Args:
        dialect: "chat" or "request".
        source: the template.
        variables: its variables; None to find their names instead.
        about: describes its input in errors, as in "a dialogue (roles user)".

    Returns:
        "text" and "turns" of the rendering; or "names", the variables that the template reads; or "refused", the message of
        raise_exception; or "fault", what is wrong with the template, with "limit" if it exceeded one.
    """
    try:
        if variables is None:
            environment = _environment(dialect)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            return {"names": sorted(names - set(environment.globals))}
        turns: list[tuple[str, str, bool]] = []
        return {"text": _compiled(dialect, source).render({**variables, "_turns": turns}), "turns": turns}
    except _Refused as error:
        return {"refused": _shorten(str(error))}
    except jinja2.TemplateSyntaxError as error:
        return {"fault": f"is not a Jinja template (line {error.lineno}: {_shorten(error.message)}); fix it"}
    except jinja2.sandbox.SecurityError as error:
        return {"fault": f"does something that the sandbox forbids: {_shorten(str(error))}; do not use it"}
    except MemoryError:
        return {"fault": _TOO_MUCH_MEMORY, "limit": True}
    except (OverflowError, RecursionError) as error:
        return {"fault": f"exceeds a limit: {_shorten(str(error))}; fix it"}
    except jinja2.UndefinedError as error:
        words = re.sub(r"'(?:\w+\.)*(\w+) object'", r"'\1'", _shorten(str(error)))
        return {"fault": f"reads a value that does not exist ({words}); correct its name"}
    except Exception as error:  # A template can raise any exception.
        return {"fault": f"fails on {about}: {type(error).__name__}: {_shorten(str(error))}"}


def _shorten(text: str | None) -> str:
    """The text on one line, with at most _MAX_MESSAGE characters."""
    return " ".join((text or "")[:_MAX_MESSAGE].split())


def serve() -> None:
    """Answers requests from the standard input until it ends: one JSON object a line, with the arguments of `answer`.

    A rendering that takes more than MAX_SECONDS ends the process, by SIGPROF.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # They are meant for the parent, whose end ends the standard input.
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY if hard < 0 else min(MAX_MEMORY, hard), hard))
    _write({})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            _write(answer(**json.loads(line, object_hook=_to_record)))
        except MemoryError:
            _write({"fault": _TOO_MUCH_MEMORY, "limit": True})


def _write(reply: Mapping[str, Any]) -> None:
    try:
        line = json.dumps(reply, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return _write({"fault": "writes half of a surrogate pair, which is not a character; fix it"})
    if len(line) > MAX_BYTES:
        return _write({"fault": f"exceeds a limit: it writes more than {MAX_BYTES} bytes; fix it", "limit": True})
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _to_record(fields: dict[str, Any]) -> Any:
    """An object with attributes, in place of the record that the parent sent."""
    if fields.keys() != {"record", "fields"}:
        return fields
    record = _record_class(fields["record"])()
    vars(record).update(fields["fields"])
    return record


@functools.cache
def _record_class(name: str) -> type:
    return type(name, (), {})
