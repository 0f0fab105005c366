"""Runs the code of custom parts and checks its results. All parts share these forms of messages:

    NAME raised TYPE at FILE:LINE: MESSAGE
    NAME returned RESULT; EXPECTED is expected

NAME is the kind and the name of the part, such as "advantage estimator 'mine'". FILE:LINE is the place in the user's code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxalign.errors import UserError

_NOT_THE_USERS = (
    pathlib.Path(__file__).resolve().parents[1],
    *(pathlib.Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""The folders of jaxalign, of Python's library and of installed packages."""


@contextlib.contextmanager
def custom_code(name: str, code: Any = None) -> Iterator[None]:
    """A context that turns an exception into the UserError "NAME raised TYPE at FILE:LINE: MESSAGE". A UserError passes
    unchanged. code: the function that is called, if known, as in `kind_and_place`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Custom code may raise anything.
        raise UserError(f"{name} raised {kind_and_place(error, code)}: {error}") from error


def kind_and_place(error: BaseException, code: Any = None) -> str:
    """ "TYPE at FILE:LINE" of an exception, or only "TYPE" if no line of the user's code raised it.

    The line is that of the innermost call in the file that defines `code`, else of the innermost call outside jaxalign,
    Python's library and installed packages. A file below the working directory has its relative path.

    Args:
      error: the exception.
      code: a function, method or callable object of the user; None if it is not known.
    """
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = _file_of(code)
    places = [call for call in calls if call[0] == own] or [call for call in calls if _is_the_users(call[0])]
    if not places:
        return type(error).__name__
    file, line = places[-1]
    with contextlib.suppress(ValueError, OSError):  # Another folder, or a working directory that was removed.
        file = str(pathlib.Path(file).relative_to(pathlib.Path.cwd()))
    return f"{type(error).__name__} at {file}:{line}"


def _file_of(code: Any) -> str | None:
    """The file that defines a function, method or callable object; None if there is none."""
    while isinstance(code, functools.partial):
        code = code.func
    with contextlib.suppress(ValueError):  # A cycle of wrapped functions.
        code = inspect.unwrap(code)
    code = code if inspect.isroutine(code) else type(code).__call__
    return getattr(getattr(code, "__code__", None), "co_filename", None)


def _is_the_users(file: str) -> bool:
    path = pathlib.Path(file)
    if "site-packages" in path.parts or file.startswith("<frozen "):
        return False
    return not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


def wrong_result(name: str, result: str, expected: str) -> UserError:
    """The error for a result that cannot be used.

    Args:
      name: the part that returned it.
      result: a description of the result.
      expected: a description of valid results.
    """
    return UserError(f"{name} returned {result}; {expected} is expected")


def new_instance(kind: type, name: str, remedy: str) -> Any:
    """An instance of a custom class, from its constructor without arguments.

    Args:
      kind: the class.
      name: the class in the error message.
      remedy: the remedy in the error message.

    Raises:
      UserError: the constructor raises.
    """
    try:
        return kind()
    except Exception as error:  # Custom code may raise anything.
        raise UserError(f"{name} cannot be created without arguments ({kind_and_place(error, kind.__init__)}: {error}); "
                        f"{remedy}") from error


def run_custom(name: str, function: Callable, inputs: Any, expected: str, count: int) -> tuple:
    """`function(inputs)` as a tuple of `count` parts.

    Args:
      name: the part with the function.
      function: the function.
      inputs: its argument.
      expected: a description of valid results, such as "(advantages, returns)".
      count: the number of parts of a valid result.

    Raises:
      UserError: the function raises, or its result is not a sequence of `count` parts.
    """
    with custom_code(name, function):
        result = function(inputs)
    if not isinstance(result, Sequence):
        raise wrong_result(name, f"a value of type {type(result).__name__}", expected)
    if len(result) != count:
        raise wrong_result(name, f"{len(result)} values", expected)
    return tuple(result)


def require_array(name: str, part: str, array: Any, shape: tuple[int, ...], any_float: bool = False) -> None:
    """Checks an array that a custom part returned. Also works on traced arrays.

    Args:
      name: the part that returned it.
      part: the array in the error message, such as "advantages".
      array: the array.
      shape: the expected shape.
      any_float: accept any dtype of floats, not only float32.

    Raises:
      UserError: `array` is not an array, or has another shape or dtype.
    """
    expected = f"a float32 array of shape {tuple(shape)}"
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise wrong_result(name, f"{part} of type {type(array).__name__}", expected)
    dtype = str(array.dtype)
    fits = dtype.startswith(("float", "bfloat")) if any_float else dtype == "float32"
    if tuple(array.shape) != tuple(shape) or not fits:
        raise wrong_result(name, f"{part} of {dtype} and shape {tuple(array.shape)}", expected)
