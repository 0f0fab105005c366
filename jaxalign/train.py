"""The entry point, `python -m jaxalign.train`: flags, the config file, exit codes, and nothing else.

Exit codes: 0 done, 2 a mistake the user can mend (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import errno
import re
import signal
import sys
import traceback
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from jaxalign import config_schema, pipeline
from jaxalign.config import Config, from_config_dict
from jaxalign.errors import UserError

_DEFAULT = "configs/quickstart.py"
_OVERRIDE = re.compile(r"--?(?P<no>no)?config\.(?P<name>[^=]*)(?:=(?P<value>.*))?", re.DOTALL)
_USAGE = f"""usage: python -m jaxalign.train [--config=FILE] [--workdir=DIR] [--overwrite] [--config.FIELD=VALUE ...]

  --config=FILE         a Python file with get_config(); default {_DEFAULT}
  --workdir=DIR         where everything is written, and an interrupted run is continued; default runs/<name of FILE>
  --overwrite           redo stages whose config or inputs changed; the old folders are kept as STAGE.old-N
  --config.FIELD=VALUE  set a field of the config, as in --config.ppo.kl_coef=0.1; docs/config.md lists them
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the pipeline and returns the exit code. `argv` includes the program's name; default sys.argv."""
    argv = list(sys.argv if argv is None else argv)
    if any(argument in ("-h", "--help", "-help", "--helpfull", "--helpshort") for argument in argv[1:]):
        print(_USAGE, end="")
        return 0
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        config, workdir, overwrite = read_arguments(argv)
        pipeline.run(config, workdir, overwrite)
        return 0
    except UserError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt:
        return _say("interrupted; run the same command again to continue where it was", 130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _say(f"the disk is full ({error}); make room and run the same command again to continue", 2)
    finally:
        signal.signal(signal.SIGTERM, previous)


def read_arguments(argv: Sequence[str]) -> tuple[Config, Path, bool]:
    """The checked config, the work directory and whether to overwrite.

    Raises:
        UserError: an unknown flag or field, a value that does not fit, or a config file that is missing or fails.
    """
    path, rest = _take_config_file(argv[1:])
    # The file comes first, so that fields set before it on the command line are heard as well.
    arguments = [argv[0], f"--config={path}", *_normalise_overrides(rest)]
    values = flags.FlagValues()
    workdir = flags.DEFINE_string("workdir", None, "Where everything is written.", flag_values=values)
    overwrite = flags.DEFINE_boolean("overwrite", False, "Redo changed stages.", flag_values=values)
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments, lock_config=False,
                                    accept_new_attributes=True)
    unused = _parse(values, arguments, path)
    if unused:
        raise UserError(f"{unused[0]!r} is not expected on the command line; a field is set as --config.FIELD=VALUE")
    if not isinstance(values["config"].value, config_dict.ConfigDict):
        raise UserError(f"{path}: get_config() returned a {type(values['config'].value).__name__}; the changed "
                        "ConfigDict of jaxalign.config.default_config() is expected")
    name = "-".join(part for part in (Path(path.partition(":")[0]).stem, path.partition(":")[2]) if part)
    return from_config_dict(values["config"].value), Path(workdir.value or f"runs/{name}"), overwrite.value


def _parse(values: flags.FlagValues, arguments: list[str], path: str) -> list[str]:
    """Parses into `values`; returns what is no flag. Every failure becomes a sentence."""
    try:
        return values(arguments)[1:]
    except flags.UnrecognizedFlagError as error:
        known = ["config", "workdir", "overwrite", *(f"config.{name}" for name in config_schema.flatten(Config()))]
        near = get_close_matches(error.flagname, known, n=1)
        hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
        raise UserError(f"--{error.flagname} is not a flag; {hint}") from None
    except Exception as error:
        cause = _cause_in_file(error, path.partition(":")[0])
        if cause is not None:
            raise UserError(cause) from None
        if isinstance(error, flags.Error):
            raise UserError(f"{str(error).partition(': ')[0]}, on the command line; --help lists the flags") from None
        raise UserError(f"{path}: get_config() must return the ConfigDict of jaxalign.config.default_config(), changed "
                        f"({type(error).__name__}: {error})") from None


def _cause_in_file(error: BaseException | None, path: str) -> str | None:
    """What went wrong in the config file, when that is where an exception came from; the flag library wraps it."""
    while error is not None:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if isinstance(error, SyntaxError) and error.filename == path:
            return f"{path}, line {error.lineno}: {error.msg}"
        if lines and isinstance(error, UserError):
            return str(error)
        if lines and not isinstance(error, flags.Error):
            return f"{path}, line {lines[-1]}: {type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, AttributeError) and "get_config" in str(error):
            return f"{path} has no function get_config(); it must return the changed ConfigDict of default_config()"
        error = error.__cause__ or error.__context__
    return None


def _take_config_file(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The config file's path, and the other arguments. A relative path is looked for here, then beside the package."""
    given, rest, waiting = _DEFAULT, [], iter(arguments)
    for argument in waiting:
        if argument in ("--config", "-config"):
            given = next(waiting, "")
        elif argument.startswith(("--config=", "-config=")):
            given = argument.partition("=")[2]
        else:
            rest.append(argument)
    file, colon, variant = given.partition(":")
    for folder in (Path(), Path(__file__).resolve().parents[1]):
        if file and (folder / file).is_file():
            return f"{folder / file}{colon}{variant}", rest
    raise UserError(f"--config={given}: there is no such file; give the path of a Python file with get_config(), "
                    f"such as {_DEFAULT}")


def _normalise_overrides(arguments: Sequence[str]) -> list[str]:
    """Brings every --config.FIELD into the form --config.FIELD=VALUE, after checking that there is such a field."""
    result, waiting = [], iter(arguments)
    for argument in waiting:
        match = _OVERRIDE.fullmatch(argument)
        if match is None:
            result.append(argument)
            continue
        name, value = match["name"], match["value"]
        kind = _field_type(name)
        if kind is bool and value is None:
            value = "False" if match["no"] else "True"
        elif match["no"]:
            raise UserError(f"{argument} turns off a flag, but config.{name} is {config_schema.type_name(kind)}; "
                            f"set it as --config.{name}=VALUE")
        value = next(waiting, None) if value is None else value
        if value is None:
            raise UserError(f"--config.{name} has no value; set it as --config.{name}=VALUE")
        if typing.get_origin(kind) is tuple and not value.startswith(("(", "[")):
            value = repr(tuple(part.strip() for part in value.split(",") if part.strip()))
        result.append(f"--config.{name}={value}")
    return result


def _field_type(name: str) -> Any:
    """The schema's type of a field. Raises UserError when there is no such field, or it is a section."""
    try:
        found = config_schema.get(Config(), name)
    except KeyError:
        raise UserError(config_schema.unknown_name(Config(), f"config.{name}")) from None
    if config_schema.is_section(type(found)):
        some = next(iter(config_schema.field_types(type(found))))
        raise UserError(f"config.{name} is a section; set its fields one by one, as in --config.{name}.{some}=VALUE")
    owner = config_schema.get(Config(), name.rpartition(".")[0]) if "." in name else Config()
    return config_schema.field_types(type(owner))[name.rpartition(".")[2]]


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _say(sentence: str, code: int) -> int:
    sys.stdout.flush()
    print(sentence, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
