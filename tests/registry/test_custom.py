"""Custom parts are run and checked with one form of message."""

import functools
import json
import pathlib
import runpy

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.registry.custom import custom_code, kind_and_place, new_instance, require_array, run_custom


def test_an_error_names_the_part_and_a_user_error_passes_unchanged():
    place = r"[^ ]*test_custom\.py:\d+"
    with pytest.raises(UserError, match=f"^judge 'mine' raised KeyError at {place}: 'x'$"), custom_code("judge 'mine'"):
        raise KeyError("x")
    with pytest.raises(UserError, match="^set x$"), custom_code("judge 'mine'"):
        raise UserError("set x")


def _raised(call):
    try:
        call()
    except Exception as error:
        return error


def test_the_place_of_an_error_is_in_the_file_of_the_code_that_was_called(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("def divide(x):\n    return 1 / x\n")
    (tmp_path / "mine.py").write_text("from helper import divide\n\n\ndef mine(x):\n    return divide(x)\n\n\n"
                                      "class Mine:\n    __call__ = staticmethod(mine)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = runpy.run_path(str(tmp_path / "mine.py"))
    mine = found["mine"]
    error = _raised(lambda: mine(0))
    line_of_helper, line = f"ZeroDivisionError at {tmp_path}/helper.py:2", f"ZeroDivisionError at {tmp_path}/mine.py:5"
    assert kind_and_place(error) == line_of_helper
    for code in (mine, functools.partial(mine, 0), functools.wraps(mine)(lambda x: mine(x)), found["Mine"]()):
        assert kind_and_place(error, code) == line
    monkeypatch.chdir(tmp_path)
    assert kind_and_place(error, mine) == "ZeroDivisionError at mine.py:5"


def test_an_error_in_the_library_of_python_is_placed_where_the_user_called_it():
    error = _raised(lambda: json.loads("{"))
    assert kind_and_place(error).startswith("JSONDecodeError at ")
    assert pathlib.Path(kind_and_place(error).split()[-1].rsplit(":", 1)[0]).name == "test_custom.py"
    assert kind_and_place(ValueError()) == "ValueError"


@pytest.mark.parametrize(("result", "shown"), [(3, "a value of type int"), ((1, 2, 3), "3 values")])
def test_a_result_with_other_parts_is_an_error(result, shown):
    assert run_custom("loss 'mine'", lambda inputs: [inputs, 2], 1, "(loss, stats)", 2) == (1, 2)
    with pytest.raises(UserError, match=rf"^loss 'mine' returned {shown}; \(loss, stats\) is expected$"):
        run_custom("loss 'mine'", lambda inputs: result, None, "(loss, stats)", 2)


@pytest.mark.parametrize(("array", "shown"), [
    (3.0, "advantages of type float"),
    (np.zeros((2, 3), np.float16), r"advantages of float16 and shape \(2, 3\)"),
    (np.zeros(2, np.float32), r"advantages of float32 and shape \(2,\)"),
])
def test_an_array_of_another_type_or_shape_is_an_error(array, shown):
    require_array("estimator", "advantages", np.zeros((2, 3), np.float32), (2, 3))
    with pytest.raises(UserError, match=rf"^estimator returned {shown}; a float32 array of shape \(2, 3\) is expected$"):
        require_array("estimator", "advantages", array, (2, 3))


def test_any_float_is_accepted_on_request():
    require_array("objective", "a loss", np.zeros(2, np.float16), (2,), any_float=True)
    with pytest.raises(UserError, match="returned a loss of int32 and shape"):
        require_array("objective", "a loss", np.zeros(2, np.int32), (2,), any_float=True)


def test_a_class_that_needs_arguments_is_an_error():
    class Needy:
        def __init__(self, url):
            self.url = url

    with pytest.raises(UserError, match=r"^the judge cannot be created without arguments \(TypeError: .*\); name an instance$"):
        new_instance(Needy, "the judge", "name an instance")
