# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Executes parts of a traced program: equations, and halves of equations, by the names they read.

Names are the variables of the program, and objects for values that one half makes for the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

Name = Any
"""A variable of a program, or an object for what one half hands to the other."""
Values = dict[Name, Any]

PRODUCTS = frozenset(
    {
        "dot_general",
        "ragged_dot",
        "ragged_dot_general",
        "conv_general_dilated",
        "pallas_call",
        "custom_call",
        "ffi_call",
    }
)
"""Primitives of products and kernels."""


class ProgramStep(NamedTuple):
    """Part of a program: an equation, or a half of one."""

    run: Callable[..., list[Any]]
    inputs: Sequence[Name]
    outputs: Sequence[Name]
    has_product: bool
    """Whether there is a product of matrices, or a kernel, inside."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Halves of a program."""

    early: list[ProgramStep]
    late: list[ProgramStep]

    @property
    def made_late(self) -> set[Name]:
        """Names of values that late steps make."""
        return {name for step in self.late for name in step.outputs}

    @property
    def crossing(self) -> list[Name]:
        """Names of values that late steps read and do not make."""
        return reads_of(self.late)


def begin_with_products(early: list[ProgramStep], late: list[ProgramStep]) -> Steps:
    """Move late steps to the first half that wait for no product.

    The first half has their inputs already. A step before a product stays, if more would be handed
    over without it: an activation moves, a gather does not.
    """
    early_names = {name for step in early for name in [*variables(step.inputs), *step.outputs]}
    multiplied: set[Name] = set()
    for step in reversed(late):
        if step.has_product or not multiplied.isdisjoint(step.outputs):
            multiplied.update(variables(step.inputs))
    remaining = []
    for step in late:
        inputs = list(variables(step.inputs))
        is_small = multiplied.isdisjoint(step.outputs) or _size(step.outputs) <= _size(inputs)
        if step.has_product or not early_names.issuperset(inputs) or not is_small:
            remaining.append(step)
        else:
            early.append(step)
            early_names.update(step.outputs)
    return Steps(early, remaining)


def whole(equation: Any) -> ProgramStep:
    """Return an equation as a step."""
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)

    def run(*values: Any) -> list[Any]:
        with equation.ctx.manager:
            made = primitive.bind(*values, **params)
        return list(made) if primitive.multiple_results else [made]

    return ProgramStep(run, equation.invars, equation.outvars, _has_product(equation))


def open_program(program: Any) -> tuple[Any, Values]:
    """Return an open program, and the values of its constants."""
    inner = getattr(program, "jaxpr", program)
    constants = getattr(program, "consts", ())
    return inner, dict(zip(inner.constvars, constants, strict=True))


def _has_product(equation: Any) -> bool:
    if equation.primitive.name in PRODUCTS:
        return True
    programs = [
        getattr(part, "jaxpr", part)
        for value in equation.params.values()
        for part in (value if isinstance(value, (tuple, list)) else [value])
    ]
    return any(
        _has_product(inner) for program in programs for inner in getattr(program, "eqns", ())
    )


class Handed:
    """Name of a value that one half hands to the other, where no variable of the program has it.

    Args:
        name: Name inside the call or loop that hands it over.
        turns: Turns of the loop, over which it is stacked.
    """

    def __init__(self, name: Name, turns: int = 1):
        self.aval = name.aval
        """Type of the value in one turn."""
        self.num_bytes = turns * size_of(name)


def size_of(name: Name) -> int:
    """Return the bytes of a value."""
    if isinstance(name, Handed):
        return name.num_bytes
    return name.aval.size * name.aval.dtype.itemsize


def _size(names: Iterable[Name]) -> int:
    """Return the bytes of values."""
    return sum(map(size_of, names))


def variables(names: Iterable[Name]) -> Iterable[Name]:
    """Yield the names that are no literals."""
    return (name for name in names if not isinstance(name, Literal))


def reads_of(steps: list[ProgramStep], results: Iterable[Name] = ()) -> list[Name]:
    """Return the names of values that steps, or results, read and no step makes."""
    made = {name for step in steps for name in step.outputs}
    read = [name for step in steps for name in variables(step.inputs)]
    names = dict.fromkeys([*read, *variables(results)])
    return [name for name in names if name not in made]


def function_of(
    steps: list[ProgramStep],
    inputs: Sequence[Name],
    results: Sequence[Name],
    constants: Mapping[Name, Any],
) -> Callable[..., list[Any]]:
    """Return the function of some steps."""

    def run(*values: Any) -> list[Any]:
        environment: Values = {**constants, **dict(zip(inputs, values, strict=True))}

        def read(name: Name) -> Any:
            return name.val if isinstance(name, Literal) else environment[name]

        for step in steps:
            made = step.run(*map(read, step.inputs))
            environment.update(zip(step.outputs, made, strict=True))
        return [read(name) for name in results]

    return run
