# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Functions with a gradient of their own take every array as an argument, on syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.source_tree import (
    PACKAGES,
    at,
    bound_names,
    check,
    functions,
    modules,
    outside_functions,
    tree,
)

_ARRAY_TYPES = re.compile(r"\b(Array|Float|Int|Bool|Shaped|QuantizedArray|ArrayLike|Any)\b")
_ARRAY_CALLS = ("jnp.", "jax.lax.", "jax.nn.", "jax.random.", "jax.numpy.")
_STATIC_FIELDS = {"shape", "dtype", "ndim", "size", "sharding"}


def closed_over_arrays(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Arrays of a function that a `custom_vjp` function inside it reads without an argument.

    Under a transformation such an array is a tracer of another trace, which is an error where a
    step is differentiated, scanned or sharded, and works in a test of the function alone.
    """
    for outer in ast.walk(module):
        if not isinstance(outer, ast.FunctionDef):
            continue
        nested = list(functions(outer))
        names = {function.name: function for function in nested}
        begin = [
            f.name for f in nested if "custom_vjp" in "".join(map(ast.unparse, f.decorator_list))
        ]
        if not begin:
            continue
        for node in ast.walk(outer):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".defvjp"):
                begin += [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]
        arrays = {
            arg.arg
            for arg in (*outer.args.posonlyargs, *outer.args.args, *outer.args.kwonlyargs)
            if not arg.arg.endswith("dtype")
            and (arg.annotation is None or _ARRAY_TYPES.search(ast.unparse(arg.annotation)))
        }
        for node in outside_functions(outer):
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(_ARRAY_CALLS):
                arrays |= {name.id for name in node.targets if isinstance(name, ast.Name)}
        stack, seen = begin, set()
        while stack:
            name = stack.pop()
            if name in seen or name not in names:
                continue
            seen.add(name)
            function = names[name]
            bound = {bound for node in ast.walk(function) for bound in bound_names(node)}
            static = {
                id(node.value)
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and node.attr in _STATIC_FIELDS
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    stack.append(node.id)
                    if node.id in arrays - bound and id(node) not in static:
                        yield node.lineno, f"{name} closes over {node.id} of {outer.name}"


def test_no_function_with_a_gradient_of_its_own_closes_over_an_array():
    check(
        at(path, line, fault)
        for path in modules(*PACKAGES)
        for line, fault in closed_over_arrays(tree(path))
    )


PLANTED = """
def outer(x: Array, sizes: Int[Array, ' G'], block: int):
    numbers = jnp.arange(3)
    def scaled(y):
        return y * sizes * block
    @jax.custom_vjp
    def run(x):
        return scaled(x)
    def backward(x, gradient):
        return gradient * numbers * x.shape[0] * sizes.shape[0],
    run.defvjp(lambda x: (run(x), x), backward)
    return run(x)
"""


def test_planted_closures_are_found():
    assert sorted(closed_over_arrays(ast.parse(PLANTED))) == [
        (5, "scaled closes over sizes of outer"),
        (10, "backward closes over numbers of outer"),
    ]
