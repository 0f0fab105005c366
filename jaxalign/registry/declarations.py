"""Reads declarations of built-in records from source text, without importing the modules that contain them.

A declaration is a decorator of a function or class at the top level of a module:

    @OBJECTIVES.declare("kto", pairs=False, anchor=mismatched_kl)
    def kto(inputs): ...

Modules with declarations import JAX, which takes 0.7 s. Reading and checking a config does not need it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any


def declared(record: type, modules: Iterable[str]) -> Iterator[Any]:
    """Yields the records that modules declare, in the order of the modules and of the text.

    The arguments of a declaration may use literals, the names of the module in which `record` is defined, and functions and
    classes of the declaring module. The latter become "module:name".

    Args:
      record: the type of the records. Its first two fields are the name and the function or class.
      modules: the full names of modules of this package.
    """
    for module in modules:
        tree = ast.parse(importlib.util.find_spec(module).loader.get_source(module))
        parts = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        names = vars(sys.modules[record.__module__]) | {node.name: f"{module}:{node.name}" for node in parts}
        for part in parts:
            for decorator in part.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", None) == "declare":
                    values = [_value(argument, names) for argument in decorator.args]
                    properties = {keyword.arg: _value(keyword.value, names) for keyword in decorator.keywords}
                    yield record(*values, names[part.name], **properties)


def _value(expression: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(expression), "<declaration>", "eval"), {"__builtins__": {}}, names)
