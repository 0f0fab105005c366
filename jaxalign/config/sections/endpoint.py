"""The OpenAI-compatible server of the judge 'endpoint'."""

from __future__ import annotations

import dataclasses
import urllib.parse

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least
from jaxalign.config.reading import unless
from jaxalign.config.schema import field
from jaxalign.errors import UserError

_ASKED = unless("url", (), "to the server's URL")


@dataclasses.dataclass(frozen=True)
class EndpointConfig(Section):
    """The OpenAI-compatible server of the judge 'endpoint'; see docs/endpoint.md."""

    url: tuple[str, ...] = field((), "Base URLs of the server, such as http://localhost:8000/v1. Several URLs of the same "
                                 "model share the requests; one that fails gets none for a while.")
    model: str = field("", "Name of the model, as the server lists it; empty: the only model that the server lists.", None,
                       _ASKED)
    key_variable: str = field("OPENAI_API_KEY", "Environment variable with the API key; if it is not set, \"none\" is "
                              "sent, which servers without keys ignore.", None, _ASKED)
    concurrency: int = field(16, "Maximum number of requests in flight.", at_least(1), _ASKED)
    requests_per_minute: int = field(0, "Maximum number of requests sent per minute; 0: no limit.", at_least(0), _ASKED)
    tokens_per_minute: int = field(0, "Maximum number of tokens sent and requested per minute; 0: no limit.", at_least(0),
                                   _ASKED)
    timeout: float = field(120.0, "Seconds after which a request without a complete reply is repeated.", above(0), _ASKED)
    max_retries: int = field(8, "How often a request is repeated after a failure that may pass, such as a full queue, a server "
                             "error or a timeout.", at_least(0), _ASKED)
    max_down: float = field(1800.0, "Seconds that a stage waits for a server that answers no request before it stops.",
                            at_least(0), _ASKED)
    cache: str = field("", "SQLite file of stored answers, which several runs may share; empty: endpoint.sqlite in the work "
                       "directory.", None, _ASKED)
    offline: bool = field(False, "Answer only from stored answers, and stop at a request that has none.", None, _ASKED)
    votes: int = field(8, "Number of sampled answers from which a label follows if the server gives no log-probabilities of "
                       "the options.", at_least(1), _ASKED)
    prices: str = field("", "JSON file of prices (docs/endpoint.md); empty: input_price and output_price.", None, _ASKED)
    input_price: float = field(0.0, "Price of a million prompt tokens, in any currency.", at_least(0), _ASKED)
    output_price: float = field(0.0, "Price of a million generated tokens, in the same currency.", at_least(0), _ASKED)
    budget: float = field(0.0, "Stop at a row boundary when the run has spent this amount; 0: no limit.", at_least(0), _ASKED)

    def check(self, config: WholeConfig, name: str) -> None:
        """Refuses a URL with a user, a password or a query: config.json and the report show URLs."""
        for url in self.url:
            parts = urllib.parse.urlsplit(url)
            if "@" in parts.netloc or parts.query:
                raise UserError(f"config.{name}.url has a URL of {parts.hostname} with a user, a password or a query, which "
                                f"config.json and the report would show; give the URL without them, and put the key into the "
                                f"environment variable {self.key_variable}")
