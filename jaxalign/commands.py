"""What the entry points of the commands share: --help, the form of warnings, the memory that JAX reserves on a GPU, the end
after a mistake of the user, Ctrl-C or a closed pipe, and output that may be closed while a run goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from jaxalign.errors import UserError, is_full, print_error, shown

if TYPE_CHECKING:  # At run time `parse_flags` imports absl, which not all commands use.
    from absl import flags

MEMORY_SHARE = 0.95
"""The share of a GPU's memory that JAX reserves for the commands. JAX's own default is 0.75."""
_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_HELP = ("-h", "--help", "-help", "--helpfull", "--helpshort")

_STAGE = re.compile(r"(\[[^\]]+\] )?(.*)", re.DOTALL)
"""A message, with the stage at its beginning if it has one."""

Explain = Callable[[BaseException], tuple[str, int] | None]
"""Returns the message and the exit code of an error that the user can correct; None for any other error."""


def explain(error: BaseException) -> tuple[str, int] | None:
    """Explains a UserError and Ctrl-C."""
    if isinstance(error, UserError):
        return str(error), 2
    return ("interrupted", 130) if isinstance(error, KeyboardInterrupt) else None


def explain_writing(error: BaseException) -> tuple[str, int] | None:
    """As `explain`, for a command that leaves nothing behind if it does not end well; also explains a full disk."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; nothing was written", 130
    if is_full(error):
        return f"the disk is full ({error}); nothing was written: free some space and run the same command again", 2
    return explain(error)


def parse_flags(values: flags.FlagValues, argv: Sequence[str], named_only: bool = True) -> list[str]:
    """Parses a command's flags into `values`. Returns the arguments that are not flags.

    Args:
      values: the flags.
      argv: the program's name and the arguments.
      named_only: whether each argument must be a flag.

    Raises:
      UserError: a flag is unknown, or its value is not valid; or an argument is not a flag, but must be one.
    """
    from absl import flags

    try:
        others = values(list(argv))[1:]
    except flags.Error as error:
        raise UserError(f"{shown(str(error))}; --help lists the flags") from None
    if others and named_only:
        raise UserError(f"{others[0]!r} is not expected on the command line; --help lists the flags")
    return others


def reserve_memory(environ: MutableMapping[str, str] | None = None) -> None:
    """Makes JAX reserve `MEMORY_SHARE` of each GPU's memory, unless the environment sets the share. Call it before JAX starts.

    Args:
      environ: the environment to change; default os.environ.
    """
    environ = os.environ if environ is None else environ
    if not any(environ.get(name) for name in _SHARES):
        environ[_SHARES[0]] = str(MEMORY_SHARE)


class _Warnings(logging.Handler):
    """Prints a record as the stages print their warnings: "warning: ..." or "[ppo] warning: ..."."""

    def emit(self, record: logging.LogRecord) -> None:
        stage, text = _STAGE.fullmatch(record.getMessage()).groups()
        print(f"{stage or ''}{record.levelname.lower()}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Prints the log records of jaxalign with the level and the message only, while the body of the `with` statement runs."""
    logger, handler = logging.getLogger("jaxalign"), _Warnings(logging.WARNING)
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def run_command(
    argv: Sequence[str] | None, usage: str, body: Callable[[list[str]], int | None], explain: Explain = explain
) -> int:
    """Prints the help, or runs the body of a command.

    If the reader of the output has ended, as `| head` does, the command ends too, without a message.

    Args:
      argv: the program's name and the arguments; None for those of the process.
      usage: the help.
      body: gets `argv` and returns the exit code; None is 0.
      explain: explains the errors of the body. Other errors are raised.

    Returns:
      The exit code.
    """
    argv = list(sys.argv if argv is None else argv)
    if any(argument in _HELP for argument in argv[1:]):
        print(usage, end="")
        return 0
    reserve_memory()
    try:
        with plain_warnings():
            code = body(argv) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # So that the flush at exit does not fail.
        return 0
    except BaseException as error:
        explained = explain(error)
        if explained is None:
            raise
        return print_error(*explained)


class _Output:
    """A text stream whose failures end its output, not the program."""

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        """Sends all further output, also that of libraries in C++, to the null device."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        if self._name == "stdout":
            print(f"standard output cannot be written ({error.strerror or error}); the run goes on without it", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def output_may_fail() -> Iterator[None]:
    """Lets the program go on, after one sentence on stderr, if the reader of its output ends, as `| head` does."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Output(sys.stdout, "stdout"), _Output(sys.stderr, "stderr")
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
