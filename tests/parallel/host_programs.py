"""The programs that the processes of `test_hosts.py` run.

They are in a module of their own that imports little: each of the many processes imports it.
"""

from __future__ import annotations

import json
import pathlib
import signal
import sys
import time

import jax
import numpy as np

from jaxalign import interrupts
from jaxalign.config import Mesh, from_config_dict
from jaxalign.errors import UserError
from jaxalign.parallel import distributed, hosts
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.parallel.sharding import make_sharding

CALLS = 200  # More results than are kept at a time.


def refuse():
    raise UserError("no")


def explain(error):
    if isinstance(error, UserError):
        return str(error), 2
    return ("interrupted", 130) if isinstance(error, KeyboardInterrupt) else None


class Counting(np.ndarray):
    """An array that records which of its rows are read."""

    read: set[int] = set()  # noqa: RUF012

    def __getitem__(self, index):
        if isinstance(index, np.ndarray):
            Counting.read |= set(index.tolist())
        return np.asarray(self)[index]


def program() -> None:
    """The program of each of two processes; each writes its observations."""
    group, (folder,) = distributed.take_flags(sys.argv[1:])
    folder = pathlib.Path(folder)
    with distributed.running(group, explain):
        number, seen = hosts.index(), {"count": hosts.count(), "first": hosts.is_first()}
        acted = []
        seen["results"] = [hosts.once(lambda i=i: acted.append(i) or [i, number]) for i in range(CALLS)]
        seen["acted"] = len(acted)
        seen["inside"] = hosts.once(lambda: hosts.once(lambda: hosts.once(lambda: number)))
        try:
            hosts.once(refuse)
        except UserError as error:
            seen["refused"] = str(error)
        began = time.monotonic()
        hosts.once(lambda: time.sleep(3))  # Longer than one polling interval: the other process keeps waiting.
        seen["waited"] = time.monotonic() - began
        sharding = make_sharding(Mesh(2, 2, 2))
        rows, index = np.arange(40).reshape(20, 2).view(Counting), np.asarray([3, 3, 19, 0, 7, 8, 9, 4])
        placed = place_rows(sharding, {"x": rows, "y": np.arange(20)}, index)
        seen["rows"] = sorted(Counting.read)
        seen["here"] = placed["x"].is_fully_addressable
        whole = fetch(placed)
        seen["x"], seen["y"] = whole["x"].tolist(), whole["y"].tolist()
        seen["sum"] = int(jax.jit(lambda tree: tree["x"].sum() + tree["y"].sum())(placed))
        try:
            make_sharding(Mesh(2, 2, 1))
        except UserError as error:
            seen["mesh"] = str(error)
        from jaxalign.tracking.progress import Progress
        from jaxalign.tracking.tracker import Trackers

        with Trackers("stage", folder) as trackers, Progress("stage", 1) as progress:
            trackers.log(0, {"loss": number})
            trackers.flush()
            progress.update(loss=number)
        print(f"printed by {number}")
        (folder / f"{number}.json").write_text(json.dumps(seen))


def failing() -> None:
    """Process 1 fails in the way that the argument names, while process 0 waits for it."""
    group, (how,) = distributed.take_flags(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with distributed.running(group, explain):
        print("up", file=sys.stderr, flush=True)
        if hosts.index() == 1 and how == "fault":
            raise ZeroDivisionError("a bug")
        while hosts.index() == 1 and how == "signal":
            time.sleep(0.1)  # Short sleeps: a signal that arrives just before a long one would be noticed only at its end.
        hosts.wait()
        time.sleep(300)


def recording() -> None:
    """Both processes are in a stage until one ends. Process 0 fails as soon as the work directory has a file "fails"."""
    from jaxalign.pipeline.companions import accompanied
    from jaxalign.storage import LocalStorage

    interrupts.install()
    group, (folder,) = distributed.take_flags(sys.argv[1:])
    config = from_config_dict({"stages": ("ppo",), "tracking": {"system_seconds": 1, "webhook": "MY_HOOK"}})
    with distributed.running(group, explain), accompanied(config, LocalStorage(folder)) as companions:
        companions.begin("ppo")
        print("up", file=sys.stderr, flush=True)
        while not hosts.is_first() or not pathlib.Path(folder, "fails").exists():
            time.sleep(0.02)
        raise RuntimeError("a collective failed")


def stepping() -> None:
    """Both processes take steps together and print the number of the last; process 1 also needs time of its own."""
    interrupts.install()
    group, _ = distributed.take_flags(sys.argv[1:])
    with distributed.running(group, lambda error: ("ended", interrupts.exit_code())), interrupts.at_steps():
        print("up", file=sys.stderr, flush=True)
        for step in range(1, 10_000):
            hosts.wait()
            time.sleep(0.02 * hosts.index())
            if interrupts.ends_after(step):
                print(step, file=sys.stderr, flush=True)
                return
