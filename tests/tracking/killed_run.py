"""A run of one stage with trackers: `python killed_run.py WORKDIR TRACKER,...` kills itself with SIGKILL at its step 7."""

from __future__ import annotations

import os
import signal
import sys

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.tracking.progress import Progress


def config(trackers=()):
    return from_config_dict({
        "seed": 3,
        "stages": ("pretrain",),
        "compile_cache": None,
        "data": {"source": "arithmetic"},
        "arithmetic": {"examples": 200},
        "model": {"layers": 1, "embed": 16, "mlp": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_length": 32},
        "pretrain": {"steps": 10, "batch_rows": 2, "row_length": 32, "checkpoint_every": 4},
        "tracking": {"trackers": trackers},
    })


if __name__ == "__main__":
    calls = []

    def killed(self, *_, **__):
        calls.append(self)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    Progress.update = killed
    pipeline.run(config(tuple(sys.argv[2].split(","))), sys.argv[1])
