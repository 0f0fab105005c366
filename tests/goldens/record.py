"""Compiles the programs of `compiled_runs` and records their facts; prints what changed.

    python -m tests.goldens.record [TOPOLOGY ...]      # all topologies whose compiler is installed
    python -m tests.goldens.record --check [TOPOLOGY ...]   # writes nothing
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

from tests.goldens.compiled_runs import (
    MESHES,
    RECORD,
    RUNS,
    compiled_facts,
    faults,
    missing,
    platform,
    read_record,
    versions,
)


def main(arguments: list[str]) -> None:
    chosen = [name for name in arguments if name != "--check"] or [name for name in MESHES if not missing(name)]
    record = read_record()
    with tempfile.TemporaryDirectory() as folder:
        for topology in chosen:
            programs = record["programs"].setdefault(topology, {})
            for run in RUNS:
                for program, facts in compiled_facts(run, topology, reports=pathlib.Path(folder)).items():
                    before = programs.get(program, {})
                    changed = faults(program, topology, facts, before) + ([] if before else ["not recorded before"])
                    print(f"{topology} {program}: {'; '.join(changed) or 'as recorded'}", flush=True)
                    programs[program] = facts.recorded()
            record["versions"][platform(topology)] = versions(topology)
    if "--check" not in arguments:
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
