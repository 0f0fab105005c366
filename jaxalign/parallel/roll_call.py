"""All processes of a run report to the coordinator's address before JAX starts, so that an error can name missing processes.

Each process sends one line of JSON to process 0, which then sends the same answer to all: success or an error.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

_LINE_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_LONGEST_LINE = 4096
_WORD = "jaxalign"
_TCP = socket.IPPROTO_TCP
_KEEP_ALIVE = (((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1), ((_TCP, socket.TCP_KEEPIDLE), 5),
               ((_TCP, socket.TCP_KEEPINTVL), 3), ((_TCP, socket.TCP_KEEPCNT), 3))  # A lost host is noticed after 14 s.


def call(coordinator: str, processes: int, process: int, timeout: float) -> dict[int, socket.socket]:
    """Waits until all `processes` have reported. coordinator: "HOST:PORT" of process 0. timeout: seconds.

    Returns:
        Open connections by process: process 0 has one to each other, and each other one to process 0. The system closes them
        when a process ends, however it ends.

    Raises:
        UserError: a process does not report in time, two have the same number, or they expect different numbers of processes.
    """
    host, _, port = coordinator.rpartition(":")
    until = time.monotonic() + timeout
    if process == 0:
        found = _receive(coordinator, int(port), processes, timeout, until)
    else:
        found = {0: _report((host.strip("[]"), int(port)), coordinator, processes, process, timeout, until)}
    for connection in found.values():
        for option, value in _KEEP_ALIVE:
            connection.setsockopt(*option, value)
    return found


def _receive(coordinator: str, port: int, processes: int, timeout: float, until: float) -> dict[int, socket.socket]:
    here: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listening(coordinator, port))
        lines = _lines(server, stack, until)
        while len(here) < processes - 1:
            caller, said = next(lines, (None, {}))
            if caller is None:
                missing = [str(i) for i in range(1, processes) if i not in here]
                _refuse(here, f"{len(here) + 1} of {processes} processes have reported to {coordinator} within {timeout:g} s; "
                              f"missing: {', '.join(missing[:16])}{', ...' if len(missing) > 16 else ''}. Start them, or raise "
                              "--start_timeout")
            number, total = said.get("process"), said.get("processes")
            if said.get("word") != _WORD or type(number) is not int or type(total) is not int or not 0 < number < total:
                continue  # Not a process of a run.
            known = here.pop(number, None)
            here[number] = caller
            if total != processes:
                _refuse(here, f"process {number} was started for {total} processes, process 0 for {processes}; "
                              "give all processes the same --processes")
            if known is not None and not _has_left(known):
                here[-1] = known
                _refuse(here, f"two processes have the number {number}; give each its own --process")
            if len(here) == processes - 1:
                here = {number: caller for number, caller in here.items() if not _has_left(caller)}
        for caller in here.values():
            _answer(caller, {"word": _WORD})
        return {number: caller.dup() for number, caller in here.items()}  # `stack` closes the callers.


def _lines(
    server: socket.socket, stack: contextlib.ExitStack, until: float
) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """Yields each caller with the object in its line, as lines arrive, until the time `until`. Callers that are silent delay no
    others, and are dropped after _LINE_SECONDS. `stack` closes the callers."""
    begun: dict[socket.socket, tuple[bytes, float]] = {}
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while (now := time.monotonic()) < until:
            for caller in [caller for caller, (_, end) in begun.items() if end < now]:
                selector.unregister(caller)
                del begun[caller]
                caller.close()
            next_end = min([until, now + _LINE_SECONDS, *(end for _, end in begun.values())])
            for caller in [key.fileobj for key, _ in selector.select(max(0.01, next_end - now))]:
                if caller is server:
                    with contextlib.suppress(OSError):  # The caller has left.
                        caller = stack.enter_context(server.accept()[0])
                        caller.settimeout(_LINE_SECONDS)
                        selector.register(caller, selectors.EVENT_READ)
                        begun[caller] = b"", now + _LINE_SECONDS
                    continue
                text, end = begun[caller]
                part = _received(caller)
                begun[caller] = text + part, end
                if not part or b"\n" in part or len(text + part) >= _LONGEST_LINE:
                    selector.unregister(caller)
                    del begun[caller]
                    yield caller, _parsed(text + part)


@contextlib.contextmanager
def _listening(coordinator: str, port: int) -> Iterator[socket.socket]:
    both = socket.has_dualstack_ipv6()
    try:
        server = socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both,
                                      backlog=1024)
    except OSError as error:
        raise UserError(f"process 0 cannot listen at {coordinator} ({error.strerror or error}); choose another port for "
                        "--coordinator") from None
    with server:
        yield server


def _refuse(here: dict[int, socket.socket], sentence: str) -> None:
    for caller in here.values():
        _answer(caller, {"word": _WORD, "error": sentence})
    raise UserError(sentence)


def _report(
    address: tuple[str, int], coordinator: str, processes: int, process: int, timeout: float, until: float
) -> socket.socket:
    why: Any = "no answer"
    while time.monotonic() < until:
        left = until - time.monotonic()
        try:
            with socket.create_connection(address, timeout=max(0.01, min(_LINE_SECONDS, left))) as caller:
                _answer(caller, {"word": _WORD, "process": process, "processes": processes})
                # Process 0 may have started later. Wait for its answer, which names the missing processes.
                caller.settimeout(timeout + _LINE_SECONDS)
                said, connection = _line(caller), caller.dup()
        except OSError as error:
            why = error.strerror or error
        else:
            if "error" in said:
                raise UserError(f"process {process}: {said['error']}")
            if said.get("word") == _WORD:
                return connection
            why = "a server answers there, but it is not process 0 of this run"
        time.sleep(max(0.0, min(_RETRY_SECONDS, until - time.monotonic())))
    raise UserError(f"process {process} cannot reach process 0 at {coordinator} within {timeout:g} s ({why}); start process 0 "
                    "there, and check that --coordinator names its host and a port that is open between the hosts")


def _answer(caller: socket.socket, said: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # It disconnected; it will call again, or is reported as missing.
        caller.sendall(json.dumps(said).encode() + b"\n")


def _line(caller: socket.socket) -> dict[str, Any]:
    """Reads one line as a JSON object; {} for anything else, or after the socket's timeout, by default _LINE_SECONDS."""
    if caller.gettimeout() is None:
        caller.settimeout(_LINE_SECONDS)
    text = b""
    while not text.endswith(b"\n") and len(text) < _LONGEST_LINE and (part := _received(caller)):
        text += part
    return _parsed(text)


def _received(caller: socket.socket) -> bytes:
    """Returns the next bytes of a caller; none if it has left, or after the socket's timeout."""
    try:
        return caller.recv(_LONGEST_LINE)
    except OSError:
        return b""


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        said = parse_json(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _has_left(caller: socket.socket) -> bool:
    caller.setblocking(False)
    try:
        return not caller.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        caller.setblocking(True)
