"""Renders chat templates: Jinja in a sandbox, with the variables and functions that `transformers` provides.

A template is untrusted code: it runs in a sandbox (`sandbox.py`), in a process of its own. Any failure becomes a UserError.

A template can take any time and memory, also within one call of a string method, so only the system can stop it. One process
serves all renderings of this process: it starts with the first one, and again after a template exceeded a limit. It ends with
this process, however that ends, because its standard input ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from jaxalign.data.chat import sandbox
from jaxalign.data.chat.sandbox import CLOSE, OPEN
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json
from jaxalign.records import Message

# Unicode noncharacters, as OPEN and CLOSE. They mark positions in a rendering and are then removed.
CUT, END = "\ufdd0", "\ufdd1"
MARKS = (CUT, END, OPEN, CLOSE)


class DialogueRefused(UserError):
    """The template refuses this dialogue, for example because roles do not alternate. It may accept other dialogues."""


def render(source: str, origin: str, messages: Sequence[Message], variables: Mapping[str, Any], begin_answer: bool) -> str:
    """The text that the template writes; `{% generation %}` blocks are enclosed in OPEN and CLOSE.

    Args:
        source: the template.
        origin: its file or folder, for error messages.
        messages: the dialogue, with any roles that the template knows.
        variables: additional variables, such as bos_token.
        begin_answer: `add_generation_prompt`: end the text at the beginning of the assistant's next answer.

    Raises:
        DialogueRefused: the template refuses the dialogue.
        UserError: the template is malformed, fails, does something that the sandbox forbids, or exceeds a limit.
    """
    arguments = {"messages": [{"role": m.role, "content": m.content} for m in messages], "tools": None, "documents": None}
    arguments |= {"add_generation_prompt": begin_answer, **variables}
    roles = ", ".join(str(message.role) for message in messages[:6])
    name, about = f"the chat template of {origin}", f"a dialogue (roles {roles}{', ...' if len(messages) > 6 else ''})"
    return run("chat", source, arguments, name, about)["text"]


def run(
    dialect: str, source: str, variables: Mapping[str, Any] | None, name: str, about: str, trusted: bool = False
) -> dict[str, Any]:
    """Renders a template, or finds its variables.

    Args:
        dialect: "chat" or "request".
        source: the template.
        variables: its variables; None to find their names instead.
        name: names the template in errors, as in "the chat template of FOLDER".
        about: describes its input in errors, as in "a dialogue (roles user)".
        trusted: whether it belongs to jaxalign; it is then rendered in this process.

    Returns:
        "text" and "turns" of the rendering, or "names", the variables that the template reads (`sandbox.answer`).

    Raises:
        DialogueRefused: the template called raise_exception.
        UserError: the template is malformed, fails, does something that the sandbox forbids, or exceeds a limit.
    """
    answer = sandbox.answer if trusted else _PROCESS.ask
    reply = answer(dialect=dialect, source=source, variables=variables, about=about)
    if "refused" in reply:
        raise DialogueRefused(f"{name} rejects {about}: {reply['refused']}")
    if "fault" in reply:
        raise UserError(f"{name} {reply['fault']}")
    return reply


_WAIT_SECONDS = 20.0
"""How long a reply may take. The process limits the processor time, which on a busy machine is less."""
_PROGRAM = "import sys; sys.path += sys.argv[1:]; import sandbox; sandbox.serve()"


class _TemplateProcess:
    """The process, started again when needed. Threads share it; a fork of this process starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The reply to a request with the arguments of `sandbox.answer`. Raises UserError if the process does not start."""
        line = _ENCODER.encode(request).encode("utf-8", "surrogatepass") + b"\n"
        with self._lock:
            try:
                child = self._child
                if child is None or child.poll() is not None:
                    child = self._start()
                reply = _exchange(child, line)
            except BaseException:  # The next request must not read the reply to this one.
                self.stop()
                raise
            if "limit" in reply:  # The process has ended, or may keep some of the memory.
                self.stop()
            return reply

    def _start(self) -> subprocess.Popen:
        self.stop()
        modules = (jinja2.__file__, markupsafe.__file__)
        folders = [str(Path(sandbox.__file__).parent), *{str(Path(module).parent.parent) for module in modules}]
        try:
            # A session of its own keeps signals of the terminal away; -I and -S ignore the user's environment and site files.
            self._child = child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *folders], bufsize=0, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if "limit" not in _exchange(child, b""):
                return child
            problem = "it does not answer" if child.poll() is None else f"it ended with code {child.returncode}"
        except OSError as error:
            problem = str(error)
        raise UserError(f"the process that renders templates does not start ({sys.executable}: {problem}); run this program "
                        "with an ordinary Python interpreter, and allow it to start processes")

    def stop(self) -> None:
        """Ends the process. The next request starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()

    def forget(self) -> None:
        """Leaves the process to the parent, after a fork."""
        child, self._child, self._lock = self._child, None, threading.Lock()
        if child is not None:
            child.stdin.close()  # Otherwise the process would not notice the end of the parent.
            child.stdout.close()
            child.returncode = 0


def _exchange(child: subprocess.Popen, line: bytes) -> dict[str, Any]:
    """Writes a line and reads the reply; if there is none, returns one that says why."""
    with contextlib.suppress(BrokenPipeError):  # Reading then finds the end.
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(child.stdin.fileno(), rest):]
    until, received = time.monotonic() + _WAIT_SECONDS, bytearray()
    poll = select.poll()
    poll.register(child.stdout)
    while not received.endswith(b"\n"):
        if not poll.poll(max(until - time.monotonic(), 0) * 1000):
            return {"fault": f"exceeds a limit: it takes more than {_WAIT_SECONDS:.0f} s; fix it", "limit": True}
        part = os.read(child.stdout.fileno(), 1 << 20)
        received += part
        if not part or len(received) > sandbox.MAX_BYTES:
            child.kill()
            return {"fault": _explain(child.wait()), "limit": True}
    return parse_json(bytes(received))


def _explain(code: int) -> str:
    """Says why the process ended with this exit code."""
    if code == -signal.SIGPROF:
        return f"exceeds a limit: it takes more than {sandbox.MAX_SECONDS:.0f} s of processor time; fix it"
    return f"exceeds a limit of memory or depth: Python ended with code {code}; fix it"


def _fields(record: Any) -> Mapping[str, Any]:
    """The JSON form of a record, which `sandbox` reads."""
    return {"record": type(record).__name__, "fields": vars(record)}


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_fields)
_PROCESS = _TemplateProcess()
atexit.register(_PROCESS.stop)
os.register_at_fork(after_in_child=_PROCESS.forget)
