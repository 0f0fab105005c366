"""Keeps JAX from ending this process before it can report that process 0 was killed.

JAX ends a process with its own stack trace at the moment the connection to the service of process 0 closes, and has no option
against it. A relay passes that connection on, and leaves JAX's side open for some seconds after the other side has closed.
Within that time `hosts.Watch` prints a sentence and ends the process.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import threading
import time

_CONNECT_SECONDS = 5.0
_PART = 1 << 16


def relayed(coordinator: str, hold_seconds: float) -> str:
    """Starts a relay to `coordinator`, "HOST:PORT", in threads of this process.

    Returns:
        The address of the relay for gRPC, an abstract socket, which has no file and no port. Other systems than Linux have no
        such sockets; there it is `coordinator` itself.
    """
    if sys.platform != "linux":
        return coordinator
    host, _, port = coordinator.rpartition(":")
    name = f"jaxalign-{secrets.token_hex(8)}"
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{name}")
    server.listen()
    threading.Thread(target=_accept, args=(server, (host.strip("[]"), int(port)), hold_seconds), name="jaxalign-relay",
                     daemon=True).start()
    return f"unix-abstract:{name}"


def _accept(server: socket.socket, address: tuple[str, int], hold_seconds: float) -> None:
    while True:
        caller, _ = server.accept()
        try:
            service = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        except OSError:  # The caller tries again.
            caller.close()
            continue
        service.settimeout(None)
        service.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target, hold in ((caller, service, 0.0), (service, caller, hold_seconds)):
            threading.Thread(target=_pass_on, args=(source, target, hold), name="jaxalign-relay", daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, hold_seconds: float) -> None:
    """Sends what the source sends to the target. Ends the stream `hold_seconds` after the source has ended."""
    with contextlib.suppress(OSError):
        while part := source.recv(_PART):
            target.sendall(part)
    time.sleep(hold_seconds)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
