"""The entry point `python -m jaxalign.convert`: flags and exit codes. `stages/shared/conversion.py` does the conversion.

Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxalign.commands import explain_writing, parse_flags, run_command
from jaxalign.errors import UserError
from jaxalign.parallel import distributed

_DTYPES = ("float32", "bfloat16", "float16")
_USAGE = """usage: python -m jaxalign.convert --source=DIR --target=DIR [--adapters] [--dtype=NAME] [--shard_gb=SIZE]
                                  [--mesh=D,F,T] [--coordinator=HOST:PORT --processes=N --process=I]

  --source=DIR     a Hugging Face folder, which is converted to Orbax; or an Orbax folder written by this command, or the
                   folder of a run's stage, such as runs/quickstart/ppo, which are converted to Hugging Face
  --target=DIR     a new folder; a failed conversion leaves nothing there
  --adapters       write the adapters that the stage trained (config.lora) as a PEFT folder; default: merge them into the
                   base and write the whole model
  --dtype=NAME     dtype of the written weights: float32, bfloat16 or float16; default: the source's
  --shard_gb=SIZE  largest safetensors file in GB (1e9 bytes); default 4
  --mesh=D,F,T     sizes of the axes data, fsdp and tensor of the mesh that holds the weights; default 1,1,1
""" + distributed.USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Converts and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _convert, explain_writing)


def _convert(argv: list[str]) -> None:
    group, rest = distributed.take_flags(argv[1:])
    values = _read_arguments([argv[0], *rest])
    with distributed.running(group, explain_writing):
        from jaxalign.stages.shared.conversion import convert

        source, target = (Path(folder).expanduser() for folder in (values.source, values.target))
        shard_bytes, mesh = int(values.shard_gb * 1e9), mesh_sizes(values.mesh)
        for sentence in convert(source, target, values.dtype, shard_bytes, mesh, values.adapters):
            print(sentence)


def _read_arguments(argv: Sequence[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("source", None, "The folder to convert.", flag_values=values)
    flags.DEFINE_string("target", None, "The new folder.", flag_values=values)
    flags.DEFINE_boolean("adapters", False, "Write only the adapters.", flag_values=values)
    flags.DEFINE_enum("dtype", None, _DTYPES, "The dtype of the weights.", flag_values=values)
    flags.DEFINE_float("shard_gb", 4.0, "The largest file.", lower_bound=1e-6, flag_values=values)
    flags.DEFINE_string("mesh", "1,1,1", "Sizes of data, fsdp and tensor.", flag_values=values)
    parse_flags(values, argv)
    for name in ("source", "target"):
        if not values[name].value:
            raise UserError(f"--{name} is not given; it must be a folder")
    return values


def mesh_sizes(text: str) -> tuple[int, int, int]:
    """The sizes of data, fsdp and tensor in "D,F,T". Raises UserError for anything else."""
    try:
        data, fsdp, tensor = (int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--mesh is {text!r}; three numbers are expected, data,fsdp,tensor, such as 1,4,2") from None
    if min(data, fsdp, tensor) < 1:
        raise UserError(f"--mesh is {text!r}; its sizes must be at least 1")
    return data, fsdp, tensor


if __name__ == "__main__":
    sys.exit(main())
