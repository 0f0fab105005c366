"""The kinds of input of `fuzz.py`: how valid files are made, how they are mutated, and which code of the package reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks import fuzz_flags, fuzz_folders, fuzz_tables
from benchmarks.fuzz_mutations import all_of, mutate_bytes, mutate_json, mutate_jsonl

_CHAT = [{"role": "user", "content": "Why is the sky blue?"}, {"role": "assistant", "content": "Air scatters light."}]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        prepare: writes the valid files to a folder.
        mutate: changes files in a copy of that folder, or makes arguments; -> what `read` needs, and what a finding shows.
            With the last argument, the share of inputs to change, 0, the files stay valid.
        read: gives the result to the package; raises what the package raises.
        share: the number of inputs relative to other kinds; kinds that compile or restore arrays have fewer.
    """

    prepare: Callable[[Path], None]
    mutate: Callable[[random.Random, Path, float], Any]
    read: Callable[[Path, Any], Any]
    share: float = 1.0


def _files(mutations: dict[str, Callable[[random.Random, bytes], bytes]]):
    """Changes one of the folder's files that match a pattern of `mutations`."""

    def mutate(chance: random.Random, folder: Path, share: float) -> tuple[str, bytes]:
        pattern = chance.choice(sorted(mutations))
        path = chance.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
        if share:
            path.write_bytes(mutations[pattern](chance, path.read_bytes()))
        return str(path.relative_to(folder)), path.read_bytes()[:2000]

    return mutate


# Data files.


def _write_rows(folder: Path, **files: list[dict[str, Any]]) -> None:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _prepare_data(folder: Path) -> None:
    _write_rows(
        folder,
        prompts=[{"prompt": "Why?", "answer": 4}, {"messages": _CHAT[:1], "answer": 5}, {"prompt": _CHAT[:1], "answer": 1}],
        preferences=[
            {"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No.", "margin": 1.0},
            {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "margin": 0.5},
            {"chosen": _CHAT, "rejected": [_CHAT[0], {"role": "assistant", "content": "No."}]},
        ],
        judgements=[
            {"prompt": "Why?", "completion": "So.", "label": True},
            {"prompt": _CHAT[:1], "completion": "No.", "label": False},
        ],
        messages=[{"messages": _CHAT}, {"prompt": "Why?", "response": "So."}, {"messages": _CHAT * 2}],
    )
    (folder / "prompts.json").write_text(json.dumps([{"prompt": "Why?"}, {"prompt": "How?"}]))
    (folder / "prompts.csv").write_text(
        'prompt,messages,answer\nWhy?,,4\nHow?,"[{""role"": ""user"", ""content"": ""x""}]",5\n'
    )
    (folder / "prompts.txt").write_text("Why?\nHow?\n")


def _read_data(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.data.sources.asked import read_asked
    from jaxalign.data.sources.jsonl import read_jsonl
    from jaxalign.data.sources.judgements import read_judgements
    from jaxalign.data.sources.preferences import read_preferences
    from jaxalign.data.sources.prompts import read_prompts
    from jaxalign.preview import read_dialogues
    from jaxalign.trainers.rows import as_examples, as_judgements, as_pairs, as_prompts

    name = given[0]
    file, stem = folder / name, name.partition(".")[0]
    readers = {
        "prompts": (lambda: read_prompts(file, 0.5), lambda: read_asked(file)),
        "preferences": (
            lambda: read_preferences(file, max_bad_share=0.5, margins=True),
            lambda: read_preferences(file, max_bad_share=0.0, gold=True),
        ),
        "judgements": (lambda: read_judgements(file, max_bad_share=0.5),),
        "messages": (lambda: read_dialogues(file),),
    }[stem]
    in_memory = {"prompts": as_prompts, "preferences": as_pairs, "judgements": as_judgements, "messages": as_examples}[stem]
    all_of(
        *readers,
        *([lambda: in_memory([row.value for row in read_jsonl(file, 1.0)[0]], "data")] if name.endswith("l") else []),
    )


def _prepare_constitutions(folder: Path) -> None:
    own = (resources.files("jaxalign.feedback") / "constitutions" / "courtesy.json").read_bytes()
    (folder / "own.json").write_bytes(own)
    paper = {"harmful0": {"prompt": ["x CritiqueRequest: y Critique:"], "edit_request": "RevisionRequest: z Revision:"}}
    public = {
        "constitutions": [{"critic": "a", "revision": "b"}],
        "system_chat": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 3,
    }
    (folder / "paper.json").write_text(json.dumps(paper))
    (folder / "public.json").write_text(json.dumps(public))


def _read_constitution(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.feedback.constitution import Constitution

    Constitution(folder / given[0])


def _prepare_prices(folder: Path) -> None:
    prices = {"date": "2026-01-31", "currency": "USD", "per_device_hour": {"v5e": 1.2}, "source": "a page"}
    (folder / "prices.json").write_text(json.dumps(prices))


def _read_prices(folder: Path, given: tuple[str, bytes]) -> None:
    from jaxalign.planner.prices import read_prices

    read_prices(str(folder / given[0]))


# Messages of other programs.

_HELLO = b'{"word": "jaxalign", "process": 1, "processes": 3}\n'


def _roll_call(chance: random.Random, folder: Path, share: float) -> bytes:
    return mutate_json(chance, _HELLO) + chance.choice((b"\n", b"")) if share else _HELLO


def _read_roll_call(folder: Path, message: bytes) -> None:
    from jaxalign.parallel.roll_call import call

    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"

    def stranger() -> None:
        for _ in range(50):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("localhost", int(address.rpartition(":")[2])), 1) as caller,
            ):
                caller.sendall(message)
                caller.shutdown(socket.SHUT_WR)
                caller.settimeout(0.5)
                caller.recv(1)
                return

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        call(address, 3, 0, 0.1)
    finally:
        thread.join()


_REPLY = {
    "id": "x",
    "model": "m",
    "choices": [
        {
            "message": {"role": "assistant", "content": "A"},
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {
                        "token": "A",
                        "logprob": -0.1,
                        "bytes": [65],
                        "top_logprobs": [{"token": "B", "logprob": -2.0, "bytes": [66]}],
                    }
                ]
            },
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1},
}
_COMPLETION = {
    "choices": [{"text": "A", "logprobs": {"tokens": ["A"], "token_logprobs": [-0.1], "top_logprobs": [{"B": -2.0}]}}]
}
_ERROR = {"error": {"message": "too many", "type": "rate_limit", "code": 429, "innererror": {"code": "x"}}}


def _wire(chance: random.Random, folder: Path, share: float) -> tuple[int, bytes]:
    status, value = chance.choice(((200, _REPLY), (200, _COMPLETION), (400, _ERROR), (429, _ERROR), (500, _ERROR)))
    content = json.dumps(value).encode()
    return status, mutate_json(chance, content) if share else content


def _read_wire(folder: Path, given: tuple[int, bytes]) -> None:
    from jaxalign.endpoint import exchange, failures, options, records, transport

    status, body = given
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = None
    target = failures.Target("http://localhost:1/v1", "m", "KEY", False)
    for path in (records.CHAT, "/completions"):
        call = exchange.Call(
            path, {}, lambda raw, path=path: records.read_reply(path, raw), lambda reply, text, target: reply
        )
        outcome = exchange._interpret(transport.HTTPResponse(status, {}, text), call, target)
        if isinstance(outcome, records.Reply):
            names = options.spell(("A", "B"), lambda name: (name, f" {name}"))
            place = options.find_verdict(outcome.tokens or ())
            options.read_options((outcome.tokens or ())[place.index :], names, place.head)
            options.count_votes([outcome.text], (("A", " A"), ("B", " B")))


KINDS = {
    "overrides": Kind(lambda folder: None, fuzz_flags.overrides, fuzz_flags.read_train),
    "config_file": Kind(
        lambda folder: None,
        fuzz_flags.config_file,
        lambda folder, text: fuzz_flags.read_train(folder, [f"--config={folder / 'config.py'}"]),
    ),
    "flags": Kind(lambda folder: None, fuzz_flags.flags, fuzz_flags.read_flags),
    "data": Kind(
        _prepare_data,
        _files(
            {"*.jsonl": mutate_jsonl, "prompts.json": mutate_json, "prompts.csv": mutate_bytes, "prompts.txt": mutate_bytes}
        ),
        _read_data,
    ),
    "tables": Kind(
        fuzz_tables.prepare,
        _files(dict.fromkeys(("parts/*.parquet", "*.arrow", "saved/*.arrow"), mutate_bytes) | {"saved/*.json": mutate_json}),
        fuzz_tables.read,
        share=0.5,
    ),
    "constitution": Kind(_prepare_constitutions, _files({"*.json": mutate_json}), _read_constitution),
    "model": Kind(
        fuzz_folders.prepare_model,
        _files(
            {
                "*/config.json": mutate_json,
                "families/*/config.json": mutate_json,
                "*/*.index.json": mutate_json,
                "*/*.safetensors": mutate_bytes,
            }
        ),
        fuzz_folders.read_model,
    ),
    "tokenizer": Kind(
        fuzz_folders.prepare_model,
        _files(
            {
                "*/tokenizer*.json": mutate_json,
                "*/tokenizer.model": mutate_bytes,
                "*/*tokens*.json": mutate_json,
                "*/generation_config.json": mutate_json,
            }
        ),
        fuzz_folders.read_tokenizer,
    ),
    "template": Kind(
        fuzz_folders.prepare_model,
        _files({"*/tokenizer_config.json": fuzz_folders.change_template}),
        fuzz_folders.read_tokenizer,
    ),
    "run": Kind(
        fuzz_folders.prepare_run,
        _files({"run/*.json": mutate_json, "run/*/*.json": mutate_json, "run/*/*.jsonl": mutate_jsonl}),
        fuzz_folders.read_run,
        0.3,
    ),
    "weights": Kind(
        fuzz_folders.prepare_run,
        _files({"run/*/params/**/*": mutate_bytes, "run/*/checkpoints/**/*": mutate_bytes}),
        fuzz_folders.read_weights,
        0.1,
    ),
    "adapters": Kind(
        fuzz_folders.prepare_adapters,
        _files({"*/adapter_config.json": mutate_json, "*/adapter_model.safetensors": mutate_bytes}),
        fuzz_folders.read_adapters,
    ),
    "prices": Kind(_prepare_prices, _files({"prices.json": mutate_json}), _read_prices, 0.3),
    "roll_call": Kind(lambda folder: None, _roll_call, _read_roll_call),
    "wire": Kind(lambda folder: None, _wire, _read_wire),
}
PLACES = {
    "model": "model-files",
    "tokenizer": "model-files",
    "template": "model-files",
    "run": "run-files",
    "weights": "run-files",
}
"""The folder of valid files of a kind, if it is shared with other kinds."""
