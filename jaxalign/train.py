"""The entry point `python -m jaxalign.train`: flags, the config file and exit codes.

Exit codes: 0 done, 2 a mistake that the user can correct (one sentence on stderr, no traceback), 130 after SIGINT, 143 after
SIGTERM.
"""

from __future__ import annotations

from jaxalign import interrupts

if __name__ == "__main__":
    interrupts.install()  # The imports below take 0.3 s.

import dataclasses
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from jaxalign import pipeline
from jaxalign.commands import output_may_fail, plain_warnings
from jaxalign.config import Config, default_for, from_config_dict, overrides, reference, schema
from jaxalign.config.root import stage_names
from jaxalign.errors import UserError, print_error, run_error, run_to_the_end, shown
from jaxalign.parallel import distributed

_DEFAULT = "configs/quickstart.py"
_USAGE = f"""usage: python -m jaxalign.train [--config=FILE] [--workdir=DIR] [--overwrite] [--dry-run]
                                [--config.FIELD=VALUE ...]
                                [--coordinator=HOST:PORT --processes=N --process=I]

  --config=FILE         a Python file with get_config(); default {_DEFAULT}
  --workdir=DIR         the output folder; the same command resumes an interrupted run in it; default runs/<name of FILE>
  --overwrite           redo stages whose config or inputs changed; the old folders are kept as STAGE.old-N
  --dry-run             check the run and print which stages it would run; run and write nothing
  --config.FIELD=VALUE  set a field of the config, as in --config.ppo.kl_coef=0.1; --help lists them
  -h, --help[=NAME]     print these flags (-h), also all fields (--help), or the section or field NAME, as in --help=ppo
{distributed.USAGE}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the pipeline and returns the exit code. `argv` includes the program's name; default sys.argv."""
    argv = list(sys.argv if argv is None else argv)
    try:
        asked = [argument for argument in argv[1:] if re.fullmatch(r"-h|--?help(full|short|=.*)?", argument)]
        if asked:  # -h: the flags; --help: also all fields; --help=NAME: one section or field.
            with output_may_fail():
                name = asked[0].partition("=")[2]
                if not name:
                    print(_USAGE, end="")
                if asked[0] not in ("-h", "--helpshort"):
                    print(reference.listing(default_for(()), name), end="")
            return 0
        group, rest = distributed.take_flags(argv[1:])
        options, rest = take_options(rest, (), switches=("dry-run",))
        config, workdir, overwrite = _read([argv[0], *rest], group)
        with output_may_fail(), plain_warnings(), distributed.running(group, _explain):
            (pipeline.dry_run if options else pipeline.run)(config, workdir, overwrite)
        return 0
    except BaseException as error:
        explained = _explain(error)
        if explained is None:
            raise
        return print_error(*explained)


def _read(argv: Sequence[str], group: distributed.ProcessGroup) -> tuple[Config, Path, bool]:
    """As `read_arguments`, but an error about the mesh comes after the error that the mesh has too many devices, if it has.

    group: the flags of several processes. The devices of such a run are known only after it starts, so they are not counted.
    """
    values, workdir, overwrite = read_values(argv)
    try:
        return from_config_dict(values), workdir, overwrite
    except UserError as error:
        if "config.mesh." in str(error) and distributed.find(group) is None:
            first = _missing_devices(values.mesh)
            raise UserError(f"{first}\n{error}" if first else str(error)) from None
        raise


def _missing_devices(sizes: Mapping[str, Any]) -> str:
    """The error for a mesh of more devices than this process has; "" if it has enough."""
    from jaxalign.parallel.mesh import AXES, make_mesh  # Imported here, because it imports JAX.

    try:
        make_mesh(**{axis: sizes[axis] for axis in AXES})
    except UserError as error:
        return str(error)
    except (RuntimeError, TypeError, ValueError, KeyError):  # No device, or a size that the config refuses.
        pass
    return ""


def _explain(error: BaseException) -> tuple[str, int] | None:
    """The message and the exit code of an error that the user can correct; None for any other error."""
    if isinstance(error, KeyboardInterrupt):
        return interrupts.SENTENCE, interrupts.exit_code()
    message = run_error(error)
    return None if message is None else (message, 2)


def read_arguments(argv: Sequence[str]) -> tuple[Config, Path, bool]:
    """The checked config, the work directory and whether to overwrite.

    Raises:
        UserError: an unknown flag or field, an invalid value, or a config file that does not exist or fails.
    """
    config, workdir, overwrite = read_values(argv)
    return from_config_dict(config), workdir, overwrite


def read_values(argv: Sequence[str]) -> tuple[config_dict.ConfigDict, Path, bool]:
    """Like `read_arguments`, but with the config's values as given, unchecked."""
    file, variant, rest = _take_config_file(argv[1:])
    config = _load(file, variant)
    default = default_for((*stage_names(config), *overrides.stages_given(rest)))
    for name, kind in schema.field_types(type(default)).items():  # Adds missing sections, so that flags can set their fields.
        if dataclasses.is_dataclass(kind) and name not in config:
            config[name] = schema.to_config_dict(getattr(default, name))
    arguments = [argv[0], *overrides.normalise(rest, default)]
    values = flags.FlagValues()
    workdir = flags.DEFINE_string("workdir", None, "The output folder.", flag_values=values)
    overwrite = flags.DEFINE_boolean("overwrite", False, "Redo changed stages.", flag_values=values)
    # The file is loaded above, since the library reports some of its errors late and others with a traceback.
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments, lock_config=False,
                                    accept_new_attributes=True)
    unused = _parse(values, arguments)
    if unused:
        raise UserError(f"{unused[0]!r} is not expected on the command line; a field is set as --config.FIELD=VALUE")
    name = "-".join(part for part in (file.stem, variant) if part)
    if workdir.value == "":
        raise UserError(f"--workdir is empty; set it to a folder, or leave it out for runs/{name}")
    return config, Path(workdir.value or f"runs/{name}"), overwrite.value


def _parse(values: flags.FlagValues, arguments: list[str]) -> list[str]:
    """Parses into `values` and returns the arguments that are not flags."""
    try:
        return values(arguments)[1:]
    except flags.UnrecognizedFlagError as error:
        fields = (f"config.{name}" for name in schema.flatten(Config()))
        known = ["config", "workdir", "overwrite", *distributed.FLAGS, *fields]
        near = get_close_matches(error.flagname, known, n=1)
        hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
        raise UserError(f"--{error.flagname} is not a flag; {hint}") from None
    except flags.Error as error:
        raise UserError(f"{shown(str(error).partition(': ')[0])}, on the command line; --help lists the flags") from None


def _load(file: Path, variant: str) -> config_dict.ConfigDict:
    """Runs a config file's get_config(). `variant`, the part of --config after the colon, is its argument if not empty.

    Raises:
        UserError: the file fails (the message has the line), or get_config() does not return a config.
    """
    path, namespace = str(file), {"__name__": "config", "__file__": str(file)}
    try:
        exec(compile(file.read_bytes(), path, "exec"), namespace)
        if not callable(namespace.get("get_config")):
            raise UserError(f"{path} has no function get_config(); it must return default_config() with changes")
        config = namespace["get_config"](*([variant] if variant else []))
    except UserError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if isinstance(error, SyntaxError) and error.filename == path:
            lines = [error.lineno]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise UserError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not isinstance(config, config_dict.ConfigDict):
        raise UserError(f"{path}: get_config() returned an object of type {type(config).__name__}; it must return "
                        "default_config() with changes")
    return config


def take_options(
    arguments: Sequence[str], names: Sequence[str], switches: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The options of a command that also takes a config, by name, and the remaining arguments, for `read_arguments`.

    Args:
      arguments: the command line without the program's name.
      names: the options that have a value.
      switches: the options without a value; they are True if given.

    Raises:
      UserError: an option has no value.
    """
    options: dict[str, Any] = {}
    rest, waiting = [], iter(arguments)
    for argument in waiting:
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in switches and not equals:
            options[name] = True
        elif argument.startswith("-") and name in names:
            options[name] = value if equals else next(waiting, "")
            if not options[name]:
                raise UserError(f"--{name} has no value; set it as --{name}=VALUE")
        else:
            rest.append(argument)
    return options, rest


def _take_config_file(arguments: Sequence[str]) -> tuple[Path, str, list[str]]:
    """The config file, the part of its name after a colon, and the other arguments.

    A relative path is looked up in the current folder, then in the folder that contains the package, then in the package, which
    contains configs/ if it was installed from a wheel.
    """
    given, rest, waiting = _DEFAULT, [], iter(arguments)
    for argument in waiting:
        if argument in ("--config", "-config"):
            given = next(waiting, "")
        elif argument.startswith(("--config=", "-config=")):
            given = argument.partition("=")[2]
        else:
            rest.append(argument)
    file, _, variant = given.partition(":")
    package = Path(__file__).resolve().parent
    for folder in (Path(), package.parent, package):
        if file and os.path.isfile(folder / file):
            return folder / file, variant, rest
    raise UserError(f"--config={given}: the file does not exist; give the path of a Python file with get_config(), "
                    f"such as {_DEFAULT}")


if __name__ == "__main__":
    run_to_the_end(main)
