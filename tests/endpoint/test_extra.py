"""Without the libraries of the extra "endpoint", the package can be imported and stored replies can be read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxalign.errors import UserError
from tests.endpoint.clients import Running, requests
from tests.endpoint.server import Server

LIBRARIES = ("aiohttp", "aiolimiter", "stamina")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_an_error_at_once_that_names_the_extra(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf'{library}, which is not installed; run `pip install "jaxalign\[endpoint\]"`'):
        Running(tmp_path, "http://localhost:8000/v1")


def test_stored_replies_are_read_offline_without_the_libraries(tmp_path, monkeypatch):
    with Server() as server, Running(tmp_path, server.url) as client:
        replies = client.ask(requests(3))
    for library in LIBRARIES:
        monkeypatch.setitem(sys.modules, library, None)
    with Running(tmp_path, offline=True) as client:
        assert client.ask(requests(3)) == replies


@pytest.mark.process
def test_importing_the_client_imports_none_of_the_libraries():
    program = "import sys, jaxalign.endpoint.client; print(sorted(set(sys.modules) & set(sys.argv[1:])))"
    done = subprocess.run([sys.executable, "-c", program, *LIBRARIES, "jax"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
