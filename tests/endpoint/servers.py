"""A real server for tests: llama.cpp, as the package xllamacpp contains it, with a tiny exported chat model."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from jaxalign.endpoint.records import EndpointRequest, Reply, read_reply

ROOT = pathlib.Path(__file__).resolve().parents[2]
_START_SECONDS = 60


class Direct:
    """Sends each request once, to a server that is ready. Replies are neither stored nor repeated."""

    def __init__(self, url: str):
        self.url = url

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """(the status, the JSON of the response)."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_START_SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def ask(self, requests: Sequence[EndpointRequest]) -> list[Reply]:
        replies = [self.attempt(request) for request in requests]
        assert None not in replies, "the server refused a request"
        return replies

    def attempt(self, request: EndpointRequest) -> Reply | None:
        """The reply; None if the server refuses the request."""
        status, raw = self.post(request.path, dict(request.body))
        return read_reply(request.path, raw) if status == 200 else None


@contextlib.contextmanager
def llama_cpp(gguf: pathlib.Path) -> Iterator[str]:
    """The base URL of llama.cpp with a model, on a free port of the loopback interface; the server stops at the end."""
    command = [sys.executable, "-m", "tests.endpoint.servers", str(gguf)]
    log = gguf.with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
    deadline = threading.Timer(_START_SECONDS, process.kill)
    deadline.start()
    try:
        lines = (line.strip() for line in process.stdout)
        address = next((line for line in lines if line.startswith("http://127.0.0.1:")), None)
        deadline.cancel()
        if address is None:
            raise RuntimeError(f"llama.cpp did not start within {_START_SECONDS} seconds:\n{log.read_text()[-2000:]}")
        _wait_until_ready(f"{address}/health")
        yield f"{address}/v1"
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _serve(gguf: str) -> None:
    """Runs in the child process: prints the address and serves until the process is ended."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.hostnames, params.port = ["127.0.0.1"], 0
    # A batch of several requests, and a prompt of which a part is cached, change the rounding of a reply. With one request at a
    # time and no cache, equal requests have equal replies.
    params.n_parallel, params.cache_prompt = 1, False
    params.n_ctx, params.n_gpu_layers, params.cpuparams.n_threads = 512, 0, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _serve(sys.argv[1])
