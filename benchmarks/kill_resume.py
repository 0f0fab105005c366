"""Check that a run that is killed repeatedly ends bit-identical to an undisturbed run.

    python benchmarks/kill_resume.py --kills 10 --seed 0

The pipeline first runs twice undisturbed: the first run fills the compile cache and is the reference; the second is timed, and
verifies that two undisturbed runs are equal. A third run is ended at random moments and restarted each time: by SIGKILL,
SIGTERM and SIGINT in turn. The last two must give the exit codes 143 and 130 and no traceback. The moments are uniform over
the timed run and are translated to a stage and an offset in it, because a restarted run skips finished stages quickly. The
comparison covers every parameter and every number of the last checkpoints (optimizers, keys, counters) bit for bit, metrics,
shards, tokenizer and summaries byte for byte, and the text of the report without its times.

Without --config the run is a short one of all eight stages (minutes on 2 cores). Other arguments, such as --config.seed=1, are
passed to the run. Exit code: 0 if all is equal, 1 if there is a difference or a failed run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A tiny model: most of the time is spent in many small steps, chunks and checkpoints instead of compilation.
SHORT = """
    world.tokens=12_000 world.topics=60 world.held_out_topics=24 world.vocab_size=400
    model.layers=1 model.embed=32 model.mlp=64 model.heads=2 model.kv_heads=2 model.head_dim=8
    pretrain.steps=1200 pretrain.batch_rows=8 pretrain.row_length=64 pretrain.optimizer.learning_rate=1e-2
    pretrain.checkpoint_every=60
    revise.red_team_prompts=400 revise.helpful_prompts=80 revise.batch=8 revise.max_new_tokens=24
    sft.epochs=20 sft.batch_rows=4 sft.row_length=128 sft.checkpoint_every=25
    feedback.max_reasoning_tokens=24 feedback.undecided=half compare.prompts=320 compare.batch=8 compare.max_new_tokens=24
    preference.epochs=20 preference.batch=8 preference.checkpoint_every=50
    ppo.iterations=160 ppo.batch=8 ppo.minibatches=2 ppo.epochs=2 ppo.checkpoint_every=8 ppo.prompts=50
    ppo.max_new_tokens=24 ppo.kl_controller=adaptive
    evaluate.prompts=320 evaluate.batch=8 evaluate.win_rate_prompts=80 evaluate.max_new_tokens=24
""".split()
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
COMPARED = ("*/metrics.jsonl", "*/rows-*.jsonl", "*/summary.json", "*/checks.json", "*/tokenizer.model", "summary.json")
_LINE = re.compile(r"\[(?P<stage>\w+)\] (?P<what>starting|continuing|finished)$")
_FINISHED = "finished"
ENDED = "the end of the run"
START = 0.3  # Seconds within which Python has started.


@dataclasses.dataclass(frozen=True)
class Span:
    """The time span of a stage, in seconds from the start of the process."""

    stage: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Hit:
    """One kill: its moment in the timed run, the target stage and offset in seconds, and the activity that it interrupted."""

    moment: float
    stage: str
    offset: float
    met: str
    disk: str


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it, and their children too.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="number of signals; default 10")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kill moments, not of the run; default 0")
    parser.add_argument("--config", help="config file of the run; default: a built-in short run")
    parser.add_argument("--folder", type=Path, help="folder that keeps the runs; default: a temporary folder")
    options, overrides = parser.parse_known_args()
    if options.folder is not None and options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"--folder {options.folder} is not empty")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill_resume_"))
    chosen = [f"--config={options.config}"] if options.config else [f"--config.{setting}" for setting in SHORT]
    command = [sys.executable, "-m", "jaxalign.train", *chosen, *overrides]
    try:
        problems = experiment(command, folder.absolute(), options.kills, random.Random(options.seed))
    except RunFailed as error:
        problems = [str(error)]
    for problem in problems:
        print(f"  {problem}")
    print("FAIL" + (f"; the runs are in {folder}" if folder.exists() else "") if problems else "PASS")
    if options.folder is None and not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0


def experiment(command: Sequence[str], folder: Path, kills: int, rng: random.Random) -> list[str]:
    """Run everything and return the differences, one sentence each."""
    untouched, control, killed = (folder / name for name in ("untouched", "control", "killed"))
    print(f"undisturbed run, {timeline(command, untouched)[-1].end:.0f} s", flush=True)
    spans = timeline(command, control)
    print("timed run, " + ", ".join(f"{span.stage} {span.end - span.start:.1f} s" for span in spans), flush=True)
    problems = [f"two undisturbed runs differ: {text}" for text in differences(untouched, control)]
    print(f"\n{'kill':>4}  {'moment':>8}  {'signal':<7}  {'aimed at':<22}  {'met':<28}  on disk then")
    hits: list[Hit] = []
    for number, moment in enumerate(sorted(rng.uniform(0, spans[-1].end) for _ in range(kills)), 1):
        sent = SIGNALS[number % len(SIGNALS)]
        hits.append(hit := kill(command, killed, spans, moment, hits[-1].moment if hits else 0.0, sent))
        aimed = f"{hit.stage} + {hit.offset:.1f} s"
        print(f"{number:>4}  {hit.moment:>6.1f} s  {sent.name:<7}  {aimed:<22}  {hit.met:<28}  {hit.disk}", flush=True)
    timeline(command, killed)
    print(f"{sum(hit.met != ENDED for hit in hits)} of {kills} kills interrupted a running stage", flush=True)
    return problems + [f"killed run differs: {text}" for text in differences(untouched, killed)]


class RunFailed(Exception):
    """A run that was not killed ended with a nonzero exit code."""


class Process:
    """One process of the run, with its stage lines and their times."""

    def __init__(self, command: Sequence[str], workdir: Path):
        self._log = tempfile.TemporaryFile("w+")
        self._began = time.perf_counter()
        self._process = subprocess.Popen([*command, f"--workdir={workdir}"], cwd=ROOT, stdout=subprocess.PIPE,
                                         stderr=self._log, text=True, start_new_session=True)
        self._events: queue.Queue[tuple[str, str, float] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if match := _LINE.match(line.strip()):
                self._events.put((match["stage"], match["what"], self.seconds()))
        self._events.put(None)

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def next(self, timeout: float | None = None) -> tuple[str, str, float] | None:
        """Return (stage, what, when) of the next stage line, or None at the end. Raises queue.Empty after `timeout` seconds."""
        return self._events.get(timeout=timeout)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        self._process.wait()

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Wait for the end. Raises RunFailed, with the last lines of stderr, if the run failed not because of `number`, or
        printed a traceback."""
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.readlines()
        if code not in (0, -number if number == signal.SIGKILL else 128 + number) or any("Traceback" in line for line in lines):
            raise RunFailed(f"a run ended with exit code {code} after {number.name}:\n{''.join(lines[-15:])}")


@contextlib.contextmanager
def running(command: Sequence[str], workdir: Path) -> Iterator[Process]:
    process = Process(command, workdir)
    try:
        yield process
    finally:
        process.kill()


def timeline(command: Sequence[str], workdir: Path) -> list[Span]:
    """Run to the end and return the time span of each stage that did any work, including the start of the process."""
    spans, began = [], 0.0
    with running(command, workdir) as process:
        while (event := process.next()) is not None:
            stage, what, at = event
            if what == _FINISHED:
                spans.append(Span(stage, began, at))
            elif not spans:
                spans.append(Span("start", 0.0, at))
            began = at
        process.end()
    return spans


def kill(command: Sequence[str], workdir: Path, spans: Sequence[Span], moment: float, last: float,
         number: signal.Signals) -> Hit:
    """Start or resume the run, and kill it at the offset in the stage that `moment` had in the timed run.

    The stage does not repeat the work from before the kill at the moment `last`, so the wait is shorter by that time. If the
    stage finishes earlier, it is killed when it does.
    """
    span = next(span for span in spans if moment <= span.end)
    offset = moment - span.start
    with running(command, workdir) as process:
        met = _wait(process, span.stage, moment - max(span.start, last), [s.stage for s in spans])
        process.kill(number)
        if number == signal.SIGKILL or process.seconds() > START:  # Python itself handles SIGINT before the program begins.
            process.end(number)
    return Hit(moment, span.stage, offset, met, on_disk(workdir, met.split()[0] if met else span.stage))


def _wait(process: Process, stage: str, offset: float, order: Sequence[str]) -> str:
    """Wait for the moment of the kill and return the current activity."""
    deadline = offset if stage == "start" else None
    here = "start"
    while True:
        try:
            event = process.next(None if deadline is None else max(0.0, deadline - process.seconds()))
        except queue.Empty:
            return here
        if event is None:
            return ENDED
        name, what, at = event
        here = f"{name} just {_FINISHED}" if what == _FINISHED else name
        if order.index(name) > order.index(stage) or (name == stage and what == _FINISHED):
            return here
        if name == stage:
            deadline = at + offset


def on_disk(workdir: Path, stage: str) -> str:
    """Describe the files from which an interrupted stage resumes."""
    folder = workdir / stage
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    found = {"metric rows": rows, "shards": len(list(folder.glob("rows-*.jsonl")))}
    found["checkpoints"] = len([path for path in folder.glob("checkpoints/*") if path.name.isdigit()])
    return ", ".join(f"{count} {name}" for name, count in found.items() if count) or "nothing"


def differences(expected: Path, found: Path) -> list[str]:
    """Return the differences between two work directories, one sentence each."""
    texts = []
    for pattern in COMPARED:
        names = {path.relative_to(root) for root in (expected, found) for path in root.glob(pattern)}
        for name in sorted(names):
            contents = [(root / name).read_bytes() if (root / name).exists() else None for root in (expected, found)]
            if contents[0] != contents[1]:
                texts.append(f"{name} is missing in one of them" if None in contents else f"{name} has different bytes")
    if report_text(expected) != report_text(found):
        texts.append("report.html has a different text")
    trees = sorted(path.relative_to(expected) for path in expected.glob("*/params"))
    for name in [*trees, *(newest(expected, path.parent.name) for path in expected.glob("*/checkpoints"))]:
        if not (found / name).is_dir():
            texts.append(f"{name} is missing")
            continue
        before, after = read_arrays(expected / name), read_arrays(found / name)
        texts += [f"{name}: {leaf} has different bits" for leaf in sorted(before.keys() | after.keys())
                  if before.get(leaf) != after.get(leaf)]
    if not trees:
        texts.append("there are no parameters to compare")
    return texts


def report_text(workdir: Path) -> str:
    """Return the report without the name of the work directory and without times, which differ between equal runs."""
    path = workdir / "report.html"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    text = re.sub(r'(?s)<section[^>]*"time-title".*?</section>', "", re.sub(rf"\b{re.escape(workdir.name)}\b", "WORKDIR", text))
    return re.sub(r"\d[\d,.]* ?(?:s|min|h|ms)\b|\d+:\d\d(?::\d\d)?|\d{4}-\d\d-\d\d", "TIME", text)


def newest(workdir: Path, stage: str) -> Path:
    """Return the last checkpoint of a stage, relative to the work directory."""
    steps = [int(path.name) for path in (workdir / stage / "checkpoints").iterdir() if path.name.isdigit()]
    name = Path(stage) / "checkpoints" / str(max(steps))
    return name / "default" if (workdir / name / "default").is_dir() else name


def read_arrays(folder: Path) -> dict[str, tuple]:
    """Return every array of an Orbax folder as (dtype, shape, bytes), by its path in the tree."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata that jaxalign does not write
    checkpointer = ocp.PyTreeCheckpointer()
    shapes = checkpointer.metadata(folder).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    tree = checkpointer.restore(folder, restore_args=as_numpy)
    leaves = ((path, np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree))
    return {jax.tree_util.keystr(path): (str(leaf.dtype), leaf.shape, leaf.tobytes()) for path, leaf in leaves}


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
