"""Measure the rate and the memory of the endpoint client: `python benchmarks/endpoint_rate.py`.

A server in another process answers each request after --delay seconds. The ideal time is requests x delay / concurrency. The
memory is the growth of the peak during the call; it contains the requests and replies, which the caller holds, and the growth
by further requests (--repeat calls) shows what the client keeps. The processor time is that of the client's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxalign.config.sections.endpoint import EndpointConfig  # noqa: E402
from jaxalign.endpoint.client import Client  # noqa: E402
from jaxalign.endpoint.records import CHAT, EndpointRequest  # noqa: E402
from jaxalign.endpoint.store import AnswerStore  # noqa: E402

MODEL = "judge"


async def serve(delay: float) -> None:
    """Answer requests until the process is killed. Prints the base URL."""
    from aiohttp import web

    most = in_flight = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal most, in_flight
        await request.read()
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(delay)
        in_flight -= 1
        choice = {"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": "stop"}
        return web.json_response({"model": MODEL, "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})

    async def models(request: web.Request) -> web.Response:
        # The list of models is the one other path that the client asks for.
        return web.json_response({"data": [{"id": str(most)}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.Event().wait()


def make_requests(start: int, count: int) -> list[EndpointRequest]:
    rows = range(start, start + count)
    bodies = ({"model": MODEL, "messages": [{"role": "user", "content": f"row {row}"}]} for row in rows)
    return [EndpointRequest(CHAT, body) for body in bodies]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The times in seconds and the growth of the peak in bytes, per call."""
    calls = []
    with tempfile.TemporaryDirectory() as folder:
        store = AnswerStore(Path(folder) / "endpoint.sqlite")
        with Client(EndpointConfig(url=(url,), model=MODEL, concurrency=options.concurrency), store) as client:
            client.list_models()
            for call in range(options.repeat):
                requests = make_requests(call * options.requests, options.requests)
                before, wall, processor = peak_bytes(), time.perf_counter(), time.process_time()
                client.ask(requests)
                calls.append((time.perf_counter() - wall, time.process_time() - processor, peak_bytes() - before))
            most = int(client.list_models()[0])
        store.close()
    seconds, processor_seconds, grown = zip(*calls, strict=True)
    ideal = options.requests * options.delay / options.concurrency
    return {
        "ideal_seconds": ideal, "seconds": min(seconds), "processor_seconds": min(processor_seconds),
        "share_of_ideal_rate": ideal / min(seconds), "most_in_flight": most, "peak_growth_bytes": list(grown),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="requests per call")
    parser.add_argument("--repeat", type=int, default=3, help="calls; the fastest counts")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds until the server answers")
    parser.add_argument("--concurrency", type=int, default=64, help="maximum number of requests in flight")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        asyncio.run(serve(options.delay))
    command = [sys.executable, __file__, "--serve", f"--delay={options.delay}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            result = measure(server.stdout.readline().strip(), options)
        finally:
            server.kill()
    if options.json:
        print(json.dumps(result))
        return 0
    for name, value in result.items():
        print(f"{name:20} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
