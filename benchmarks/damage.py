"""Damages files of a finished work directory, repeats the command, and lists every wrong end.

    python benchmarks/damage.py --seed=1 --acts=60

Each act copies the work directory of a finished run of all stages, damages one file, and runs the same command again. A right
end is a UserError that names the file or the stage, a repair after which all files equal the undamaged ones (clock times
excepted), or, for a file that the command does not read, no change of any other file. The weights in `params` are read by later
commands, so an act on them also loads them. A checkpoint is read by an unfinished stage, so an act on one first marks its stage
as running, without its results, and the run has no later stage. Anything else is a finding, and so is an act of more than 60
seconds of processor time. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.fuzz_mutations import HOSTILE, _places  # noqa: E402
from jaxalign import pipeline  # noqa: E402
from jaxalign.config import from_config_dict  # noqa: E402
from jaxalign.errors import UserError  # noqa: E402
from jaxalign.stages.shared.conversion import convert  # noqa: E402
from tests.small_run import CONFIG  # noqa: E402

SECONDS = 60
CLOCKS = ("timing.jsonl", "device_times.jsonl", "system.jsonl", ".lock")
NO_CHANGE = "nothing to damage"


def flip(chance: random.Random, path: Path, run: Path) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(chance: random.Random, path: Path, run: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def exchange(chance: random.Random, path: Path, run: Path) -> None:
    """Takes the file of the same kind of another stage."""
    stage = path.relative_to(run).parts[0]
    others = [other for other in sorted(run.rglob(path.name)) if other.relative_to(run).parts[0] != stage]
    if path.parent.name == "d":  # The names in these folders are random.
        others = [other for other in sorted(run.rglob("d/*")) if other.relative_to(run).parts[0] != stage]
    path.write_bytes(chance.choice(others).read_bytes())


def replace_value(chance: random.Random, path: Path, run: Path) -> None:
    """Replaces a value of a JSON file, or of a line of a JSONL file."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = chance.randrange(len(lines))
    value = json.loads(lines[at])
    holder, key = chance.choice(list(_places(value)))
    holder[key] = chance.choice(HOSTILE)
    lines[at] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def rename_checkpoint(chance: random.Random, path: Path, run: Path) -> None:
    parts = path.relative_to(run).parts
    (run / parts[0] / "checkpoints" / parts[2]).rename(run / parts[0] / "checkpoints" / "999")


DAMAGES: dict[str, Callable[[random.Random, Path, Path], object]] = {
    "flip": flip,
    "cut": cut,
    "double": lambda chance, path, run: path.write_bytes(path.read_bytes() * 2),
    "empty": lambda chance, path, run: path.write_bytes(b""),
    "delete": lambda chance, path, run: path.unlink(),
    "exchange": exchange,
    "value": replace_value,
    "rename": rename_checkpoint,
}


def act(chance: random.Random, finished: Path, run: Path, damage: str) -> tuple[str, str, bool]:
    """Damages one file of a copy and runs the command. -> (the file with its damage, how that ended, whether it was right)."""
    for place in (run, Path(f"{run}-converted")):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(finished, run)
    eligible = _eligible(finished, damage)
    if chance.random() < 0.85:  # Half of the files are in checkpoints, and an act on one takes ten times as long.
        eligible = [path for path in eligible if "checkpoints" not in path.parts] or eligible
    path = run / chance.choice(eligible).relative_to(finished)
    name = path.relative_to(run)
    config = dict(CONFIG)
    if "checkpoints" in name.parts:
        _reopen(run, name.parts[0])
        stages = list(from_config_dict(CONFIG).stages)
        config["stages"] = tuple(stages[: stages.index(name.parts[0]) + 1])
    before = path.read_bytes()
    DAMAGES[damage](chance, path, run)
    if path.exists() and path.read_bytes() == before:
        return f"{damage} {name}", NO_CHANGE, True
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            pipeline.run(from_config_dict(config), run)
            if "params" in name.parts:
                convert(run / name.parts[0], Path(f"{run}-converted"), None, 2**30, (1, 1, 1))
    except UserError as error:
        named = name.parts[0] in str(error) or name.name in str(error)
        return f"{damage} {name}", f"refused: {error}", named
    except BaseException as error:
        traceback.print_exc()
        return f"{damage} {name}", f"{type(error).__name__}: {error}", False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return f"{damage} {name}", *_compare(finished, run, name)


def _eligible(finished: Path, damage: str) -> list[Path]:
    """The files on which a kind of damage is possible. Names in the order of stages, so that a seed determines the choice."""
    files = [path for path in sorted(finished.rglob("*")) if path.is_file() and path.name != ".lock" and path.stat().st_size]
    if damage == "rename":
        return [path for path in files if path.name == "_CHECKPOINT_METADATA" and "checkpoints" in path.parts]
    if damage == "value":
        return [path for path in files if path.suffix in (".json", ".jsonl")]
    if damage == "exchange":
        return [path for path in files if len(list(finished.rglob(path.name))) > 1 or path.parent.name == "d"]
    return files


def _reopen(run: Path, stage: str) -> None:
    """Marks a stage as running, without its final weights and summary; removes the later stages and the report."""
    stages = list(from_config_dict(CONFIG).stages)
    for later in stages[stages.index(stage) + 1 :]:
        shutil.rmtree(run / later)
    for name in ("params", "ensemble"):
        shutil.rmtree(run / stage / name, ignore_errors=True)
    for path in (run / "summary.json", run / "report.html", run / stage / "summary.json"):
        path.unlink(missing_ok=True)
    manifest = json.loads((run / stage / "manifest.json").read_text())
    (run / stage / "manifest.json").write_text(json.dumps(manifest | {"status": "running", "outputs": {}}))


def _compare(finished: Path, run: Path, damaged: Path) -> tuple[str, bool]:
    """-> (how a run that ended well left its files, whether that was right)."""
    differ = [str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.is_file() and _differs(path, finished, run)]
    if "checkpoints" in damaged.parts:  # The later stages were removed from the folder and from the config.
        differ.remove("config.json")
    else:
        differ += [str(path.relative_to(finished)) for path in sorted(finished.rglob("*"))
                   if path.is_file() and path.name not in CLOCKS and not (run / path.relative_to(finished)).exists()]
    differ = [name for name in dict.fromkeys(differ) if "checkpoints" not in name and not name.endswith("manifest.json")]
    unread = damaged.name in CLOCKS
    if differ == [str(damaged)] and "params" in damaged.parts:  # The weights were loaded without the file.
        differ, unread = [], True
    if not differ:
        return "not read, nothing else changed" if unread else "repaired or fell back, all results equal", True
    return f"differs silently: {', '.join(differ[:5])}", False


def _differs(path: Path, finished: Path, run: Path) -> bool:
    if path.name in CLOCKS:
        return False
    parts = path.relative_to(run).parts
    if "params" in parts and path.parent.name == "d":  # The names and the metadata of Orbax change; the checksums are compared.
        return False
    other = finished / path.relative_to(run)
    if "params" in parts:
        return path.name == "_CHECKPOINT_METADATA" and _checksums(path) != _checksums(other)
    return not other.exists() or path.read_bytes() != other.read_bytes()


def _checksums(path: Path) -> object:
    return json.loads(path.read_text())["custom_metadata"]["checksums"]


def _stop(*_) -> None:
    raise TimeoutError(f"more than {SECONDS} s of processor time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="determines the acts (default 0)")
    parser.add_argument("--acts", type=int, default=60, help="the number of acts (default 60)")
    parser.add_argument("--finished", type=Path, help="a finished run of tests/small_run.py (default: make one)")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no further act after this time (default: no limit)")
    given = parser.parse_args()
    signal.signal(signal.SIGPROF, _stop)
    until = time.monotonic() + given.minutes * 60 if given.minutes else float("inf")
    ends: Counter[str] = Counter()
    findings = 0
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        finished = given.finished or Path(folder) / "finished"
        if given.finished is None:
            pipeline.run(from_config_dict(CONFIG), finished)
        for number in range(given.acts):
            if time.monotonic() > until:
                break
            started, damage = time.monotonic(), list(DAMAGES)[number % len(DAMAGES)]
            what, end, right = act(random.Random(f"{given.seed} {number}"), finished, Path(folder) / "run", damage)
            print(f"{'' if right else 'FINDING '}{number} {what}: {end[:300]} ({time.monotonic() - started:.1f} s)", flush=True)
            ends[f"{damage}: {end.partition(':')[0] if right else 'finding'}"] += 1
            findings += not right
    print(json.dumps(dict(sorted(ends.items())), indent=1))
    print(f"{sum(ends.values())} acts, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
