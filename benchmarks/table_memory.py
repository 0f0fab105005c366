"""Time and memory of reading a large Parquet folder: the first rows, rows by index, a limited read, a window, stages sft,
preference, dpo and revise in windows with a tiny model, and a pass over all rows.

    python -m benchmarks.table_memory --rows=10000000

Each measurement runs in its own process, whose peak resident memory (in decimal megabytes) includes Python, NumPy and pyarrow,
and that of a stage also JAX: `--only=sft,preference,dpo --rows=1000` measures the same runs on little data. A stage compiles
its programs, as in a first run (cold), unless `--cache` names a folder with compiled programs, as a resumed run has (warm).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # An installed plug-in for TPUs would take another 90 MB.

FILES = 10
BATCH = 64
COLUMNS = ("prompt", "chosen", "rejected")
WINDOW = 8_192
STEPS = 100
"""Steps of a stage: of 4 rows of 256 tokens in sft, of 32 pairs in preference (one member) and dpo. Stage revise answers and
revises 256 prompts in batches of 64."""
STAGES = ("sft", "preference", "dpo", "revise")
GROUP = 100_000
"""Rows in a row group of the Parquet files."""


def write_folder(folder: Path, rows: int) -> int:
    """Writes preference pairs of about 130 bytes to `FILES` Parquet files, and returns their size in bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    share = rows // FILES
    for number in range(FILES):
        path = folder / f"train-{number:05d}.parquet"
        with parquet.ParquetWriter(path, pa.schema([(name, pa.string()) for name in COLUMNS])) as writer:
            for start in range(number * share, (number + 1) * share, GROUP):
                ids = range(start, min(start + GROUP, (number + 1) * share))
                columns = (
                    [f"Question {i}: what is {i % 97} plus {i % 89}?" for i in ids],
                    [f"It is {i % 97 + i % 89}, since addition is exact." for i in ids],
                    [f"I cannot say what {i % 97} is." for i in ids],
                )
                writer.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True))), row_group_size=GROUP)
    return sum(file.stat().st_size for file in folder.iterdir())


def measure(folder: Path, what: str, window: int, cache: str) -> dict[str, float]:
    """Runs one measurement in this process: {"seconds", "processor" (seconds), "megabytes", "rows"}, of a stage also "data".

    Args:
      folder: the Parquet files.
      what: the measurement.
      window: `data.window` of stages.
      cache: the folder of compiled programs of stages; empty: a new one.
    """
    import numpy as np

    from jaxalign.data.sources.preferences import read_preferences
    from jaxalign.data.sources.rows import open_rows

    began, worked = time.perf_counter(), time.process_time()
    if what == "limited":
        count = len(read_preferences(folder, limit=10_000)[0])
    elif what == "split":
        from jaxalign.data.sources.base import split_by_prompt

        parts = split_by_prompt(read_preferences(folder)[0], 0.001)
        chosen = np.random.default_rng(0).integers(len(parts[0]), size=BATCH)
        count = len(parts[0]) + len(parts[1])
        assert all(parts[0][i].response_a for i in chosen)
    elif what in STAGES:
        return measure_stage(folder, what, window, cache)
    elif what == "window":
        from jaxalign.data.sources.preferences import PairOptions, PairReader
        from jaxalign.data.sources.rows import open_indexed_rows
        from jaxalign.data.sources.window_rows import WindowRows
        from jaxalign.data.windows import WindowOrder

        source = WindowRows(open_indexed_rows(folder), PairReader("rows", "human", PairOptions()))
        blocks = WindowOrder(len(source.rows), window, 0, 3).blocks_of(0)
        count = sum(len(source.records(block.tolist(), {})) for block in blocks)
    else:
        rows = open_rows(folder)
        if what == "first":
            count = sum(1 for _, row in zip(range(BATCH), rows, strict=False) if row.value["prompt"])
        elif what == "random":
            chosen = np.random.default_rng(0).integers(len(rows), size=BATCH)
            count = sum(1 for i in chosen.tolist() if rows[i].line == i + 1)
        else:
            count = sum(1 for row in rows if row.value["prompt"])
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    return {"seconds": seconds, "processor": worked, "megabytes": peak_megabytes(), "rows": count}


def run_stages(folder: Path, workdir: Path, window: int, stages: tuple[str, ...], cache: str) -> list[float]:
    """Runs stages with the rows of the folder and a tiny model; pretrain makes its tokenizer and random weights.

    Returns the seconds from the start of a stage to each batch of rows that it receives.

    Stage revise reads the column "prompt" of the rows as red-team prompts, and starts from the model of the work directory.
    """
    from jaxalign import pipeline
    from jaxalign.config import from_config_dict

    values = {
        "stages": stages, "compile_cache": cache, "pretrain": {"steps": 0},
        "model": {"embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32},
        "data": {"source": "preferences_jsonl", "train": str(folder), "window": window},
        "sft": {"steps": STEPS}, "preference": {"steps": STEPS, "members": 1}, "dpo": {"steps": STEPS},
    }
    if stages[-1] == "revise":
        values |= {"stages": ("revise",), "model": {"source": "huggingface", "path": str(workdir / "pretrain")}}
        values["data"] = {"source": "prompts_jsonl", "red_team": str(folder), "window": window}
        values["revise"] = {"red_team_prompts": 256, "batch": BATCH, "rounds": 1, "max_new_tokens": 32}
        workdir = workdir / "asked"
    began: list[float] = []

    def load(name: str) -> object:
        stage = pipeline.load_stage(name)
        run = stage.run
        stage.run = lambda context: (began.append(context.began), run(context))
        return stage

    with received(stages[-1]) as times:
        pipeline.run(from_config_dict(values), workdir, load=load)
    return [at - began[-1] for at in times]


@contextlib.contextmanager
def received(stage: str) -> Iterator[list[float]]:
    """Lists when the stage receives each batch of rows, by `time.perf_counter`."""
    from jaxalign.data.windows import WindowedRows
    from jaxalign.stages import revise

    times: list[float] = []
    owner, name = (revise, "answer_and_revise") if stage == "revise" else (WindowedRows, "take")
    method: Callable = getattr(owner, name)

    def noted(*arguments: object) -> object:
        if stage == "revise":  # It is called with the batch; the other returns it.
            times.append(time.perf_counter())
        result = method(*arguments)
        times.append(time.perf_counter())
        return result

    with mock.patch.object(owner, name, noted):
        yield times


def peak_megabytes() -> float:
    """The peak resident memory of this process in decimal megabytes. Linux counts it in units of 1,024 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure_stage(folder: Path, stage: str, window: int, cache: str) -> dict[str, float]:
    """Runs a stage in windows with a random tiny model. "data" is the time from the start of the stage to its first batch of
    rows, without the imports before it; "seconds" is the time from the start of the stage to the end of its first step, with
    reading and compiling, or of revise from the start of the run to its first rows, a batch of answers and revisions; "rows"
    are the rows that were read."""
    from jaxalign.json_text import parse_json

    with tempfile.TemporaryDirectory() as made:
        workdir, cache = Path(made), cache or str(Path(made) / "programs")
        arguments = (folder, workdir, 0, ("pretrain",), "")
        base = multiprocessing.get_context("spawn").Process(target=run_stages, args=arguments)
        base.start()  # In a process of its own, whose memory does not count, with the user's compile cache.
        base.join()
        began, worked = time.time(), time.process_time()
        batches = run_stages(folder, workdir, window, ("pretrain", stage), cache)
        worked = time.process_time() - worked
        workdir = workdir / "asked" if stage == "revise" else workdir
        if stage == "revise":
            seconds = min(path.stat().st_mtime for path in (workdir / stage).glob("rows-*.jsonl")) - began
        else:
            timing = [parse_json(line) for line in (workdir / stage / "timing.jsonl").read_text().splitlines()]
            seconds = next(row["since"] for row in timing if row["phase"] == "first step")
        data = parse_json((workdir / stage / "summary.json").read_text())["data"]
        rows = sum(file["rows"] for file in data.get("files", (data,)))
    return {"seconds": seconds, "processor": worked, "megabytes": peak_megabytes(), "rows": rows, "data": batches[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, help="an existing folder; default: write one, and delete it afterwards")
    parser.add_argument("--measure", help="the measurement of this process")
    parser.add_argument("--only", default="first,random,limited,window,sft,preference,dpo,revise,all,split")
    parser.add_argument("--window", type=int, default=WINDOW, help="rows in a window (data.window)")
    parser.add_argument("--cache", default="", help="folder of compiled programs for stages; default: a new one for each stage")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.folder, options.measure, options.window, options.cache)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        if options.folder is None or not any(folder.iterdir()):
            folder.mkdir(exist_ok=True)
            size = write_folder(folder, options.rows)
            print(f"{options.rows:,} rows in {FILES} Parquet files of {size / 1e6:,.0f} MB together")
        for what in options.only.split(","):
            command = [sys.executable, "-m", "benchmarks.table_memory", f"--folder={folder}", f"--measure={what}",
                       f"--window={options.window}", f"--cache={options.cache}"]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
            print(f"{what:10} {found['rows']:>12,.0f} rows {found['seconds']:8.2f} s ({found['processor']:.2f} s of "
                  f"processor time) {found['megabytes']:8,.0f} MB"
                  + (f", first rows after {found['data']:.2f} s" if "data" in found else ""), flush=True)


if __name__ == "__main__":
    main()
