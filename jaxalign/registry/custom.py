"""Runs the code of custom parts and checks its results. All parts share these forms of messages:

    NAME raised TYPE: MESSAGE
    NAME returned RESULT; EXPECTED is expected

NAME is the kind and the name of the part, such as "advantage estimator 'mine'".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxalign.errors import UserError


@contextlib.contextmanager
def custom_code(name: str) -> Iterator[None]:
    """A context that turns an exception into the UserError "NAME raised TYPE: MESSAGE". A UserError passes unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Custom code may raise anything.
        raise UserError(f"{name} raised {type(error).__name__}: {error}") from error


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
        raise UserError(f"{name} cannot be created without arguments ({type(error).__name__}: {error}); {remedy}") from error


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
    with custom_code(name):
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
