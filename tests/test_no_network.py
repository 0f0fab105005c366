"""The guard of conftest.py: a test that needs the network fails."""

from __future__ import annotations

import errno
import socket

import pytest

ELSEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737)


def test_other_machines_cannot_be_reached():
    with socket.socket() as client:
        with pytest.raises(OSError, match="tests must not use the network: connect to .'192.0.2.1', 80."):
            client.connect((ELSEWHERE, 80))
        assert client.connect_ex((ELSEWHERE, 80)) == errno.ENETUNREACH


def test_names_of_other_machines_cannot_be_looked_up():
    with pytest.raises(socket.gaierror, match="tests must not use the network: look up example.org"):
        socket.create_connection(("example.org", 80))


def test_this_machine_can_be_reached():
    with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()
