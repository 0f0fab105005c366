"""Counts the requests of a stage to the server of `config.endpoint`, and records them in the stage's summary."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from jaxalign.endpoint.client import Client
from jaxalign.endpoint.redaction import shown_url
from jaxalign.endpoint.store import AnswerStore
from jaxalign.parallel import hosts
from jaxalign.registry.judges import judge_name
from jaxalign.stages.shared import endpoints, judges
from jaxalign.stages.shared.base import StageContext
from jaxalign.storage import json_bytes, write_bytes_atomically
from jaxalign.tracking import requests
from jaxalign.tracking.progress import noted
from jaxalign.tracking.workdir import read_object


@contextlib.contextmanager
def counted(context: StageContext, stage: str) -> Iterator[None]:
    """Counts the requests that a stage sends in the body of the `with` statement.

    Progress lines show the money spent, if prices are set. At the end the counts are printed, and the stage's summary.json
    gets the field "endpoint" (docs/data_formats.md), unless the stage asked nothing. The counts include the earlier starts
    of an interrupted stage. A stage with another judge is not affected.

    Raises:
      UserError: the store of answers cannot be used, or `config.endpoint` is not usable.
    """
    config = context.config
    if judge_name(config, stage) != "endpoint" or not judges.asked_methods(config, stage):
        yield
        return
    connected: list[tuple[Client, AnswerStore]] = []
    hosts.once(lambda: connected.append(_begin(context)))
    try:
        with noted(lambda: _spent(connected[0][0]) if connected else ""):
            yield
    except BaseException:
        for client, _ in connected:
            client.spending.save_stage()
        raise
    hosts.once(lambda: _record(context, *connected[0]))


def _begin(context: StageContext) -> tuple[Client, AnswerStore]:
    client, store = endpoints.connect(context.config.endpoint, context.workdir)
    # Relative to the store, so that a work directory that is moved with its store keeps its counts.
    name = os.path.relpath(context.directory.resolve(), store.path.resolve().parent)
    client.spending.begin_stage(name, context.resumed)
    return client, store


def _spent(client: Client) -> str:
    spending = client.spending
    return f"{requests.amount(spending.of_stage()['money'])} spent" if spending.prices.are_set else ""


def _record(context: StageContext, client: Client, store: AnswerStore) -> None:
    client.spending.end_stage()
    counts, settings = client.spending.of_stage(), context.config.endpoint
    if not counts["sent"] and not counts["stored_hits"]:
        return
    _, stored = endpoints.stored_server(settings, store)
    model = settings.model if stored is None else stored[0]
    server = {"model": model, "urls": [shown_url(url) for url in settings.url]}
    path = context.directory / "summary.json"
    summary = read_object(path)
    write_bytes_atomically(path, json_bytes(summary | {requests.FIELD: server | counts}))
    print(f"[{context.title}] {requests.sentence(counts, client.spending.prices.are_set)}", flush=True)
