"""The client of `config.endpoint`, what its server can do, and the judge that asks it."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from jaxalign.config import Config, EndpointConfig
from jaxalign.data.chat.requests import TemplateSet, load_set
from jaxalign.endpoint.client import Client
from jaxalign.endpoint.probe import Abilities, probe
from jaxalign.endpoint.redaction import shown_url
from jaxalign.endpoint.store import AnswerStore
from jaxalign.errors import UserError
from jaxalign.feedback.endpoint_judge import EndpointJudge
from jaxalign.feedback.judge import JudgeInputs
from jaxalign.json_text import parse_json
from jaxalign.registry.judges import JUDGES, METHODS

STORE = "endpoint.sqlite"
"""The file of stored answers in the work directory."""


def templates(config: Config) -> TemplateSet:
    """The template set of the requests.

    Raises:
      UserError: the set is not written for chat models.
    """
    template_set = load_set(config.feedback.templates or "chat")
    if template_set.layout != "chat":
        raise UserError(f"config.feedback.templates is {config.feedback.templates!r}, a set of the layout "
                        f"{template_set.layout!r}, but the judge 'endpoint' sends messages; set it to 'chat', or to a set of "
                        "your own with this layout")
    return template_set


@JUDGES.declare("endpoint", methods=METHODS)
def make_endpoint_judge(inputs: JudgeInputs) -> EndpointJudge:
    """The judge that asks the server of `config.endpoint`."""
    config, context = inputs.config, inputs.context
    client, store = connect(config.endpoint, context.workdir)
    model, abilities = _server(config.endpoint, client, store)
    print(f"[{context.title}] judge {model!r} at {', '.join(map(shown_url, config.endpoint.url))}. {abilities}", flush=True)
    return EndpointJudge(client, model, abilities, templates(config), config.feedback, config.endpoint.votes, inputs.writing)


@functools.cache
def connect(settings: EndpointConfig, workdir: Path) -> tuple[Client, AnswerStore]:
    """The client and its store. All stages of a run share them, so that limits and counts hold for the run."""
    store = AnswerStore(Path(settings.cache).expanduser() if settings.cache else workdir / STORE)
    client = Client(settings, store)
    atexit.register(client.close)
    return client, store


def stored_server(settings: EndpointConfig, store: AnswerStore) -> tuple[str, list[Any] | None]:
    """(the name of the server's record in the store, [its model, its abilities] or None if they are not stored)."""
    name = json.dumps(["server", [shown_url(url) for url in settings.url], settings.model])
    stored = store.fact(name)
    return name, None if stored is None else parse_json(stored)


def _server(settings: EndpointConfig, client: Client, store: AnswerStore) -> tuple[str, Abilities]:
    """The model's name and what the server can do: as stored, or else from the server.

    Raises:
      UserError: the server cannot be asked, or it lists several models and `endpoint.model` is empty.
    """
    name, stored = stored_server(settings, store)
    if stored is not None:
        return stored[0], Abilities(**stored[1])
    model = settings.model
    if not model:
        models = client.list_models()
        if len(models) != 1:
            listed = ", ".join(models[:8]) or "no model"
            raise UserError(f"config.endpoint.model is empty, and {shown_url(settings.url[0])} lists {listed}; set it to the "
                            "name of one model")
        model = models[0]
    abilities = probe(client, model)
    store.keep_fact(name, json.dumps([model, dataclasses.asdict(abilities)]))
    return model, abilities
