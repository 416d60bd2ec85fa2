# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Splits a function into one that gives some of its results, and one that gives the others later.

A pipeline with deferred weight gradients splits the backward pass of its layers: the first half
gives the gradient of the stream, the second the gradients of the weights. No work is done twice:
what only the late results need is left to the second half, and what both need is computed in the
first and handed over.

The program of the function is split equation by equation. Loops, regions and calls with results of
both kinds are split inside. What cannot be split, as a conditional or a loop of unknown length,
stays whole in the first half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from pallas_kernels.jax_versions import loop_counts
from sharding.pipeline.steps import (
    Handed,
    Name,
    ProgramStep,
    Steps,
    Values,
    begin_with_products,
    function_of,
    open_program,
    reads_of,
    variables,
    whole,
)


@dataclasses.dataclass(frozen=True)
class Halves:
    """A function in two halves."""

    is_late: tuple[bool, ...]
    """Whether the second half gives a result, for the leaves of the results in order. A result
    whose work could not be split is not late."""
    handed: tuple[Any, ...]
    """Shapes of what the first half hands over."""
    early: Callable[..., tuple[Any, tuple[Array, ...]]]
    """The arguments -> (results with None in the place of late ones, what is handed over)."""
    late: Callable[..., Any]
    """(what was handed over, *kept arguments) -> late results, with None for the others."""


def split(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    is_kept: Sequence[bool],
    is_late: Callable[[Any], Any],
) -> Halves:
    """Return the halves of a function.

    Args:
        function: Traced once. It may close over arrays that both halves can read.
        arguments: Shapes of its arguments.
        is_kept: For each argument, whether the second half is given it again.
        is_late: From the shapes of the results to a tree of bool like them.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    inner, constants = open_program(program)
    is_wanted = jax.tree.leaves(is_late(shapes))
    steps = _split(inner, is_wanted)
    late = tuple(
        want and name in steps.made_late
        for want, name in zip(is_wanted, inner.outvars, strict=True)
    )
    early_results = [name for name, is_late in zip(inner.outvars, late, strict=True) if not is_late]
    late_results = [name for name, is_late in zip(inner.outvars, late, strict=True) if is_late]
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    keeps = [keep for keep, count in zip(is_kept, counts, strict=True) for _ in range(count)]
    again = [name for name, keep in zip(inner.invars, keeps, strict=True) if keep]
    handed = [name for name in steps.crossing if name not in {*again, *constants}]
    first = function_of(steps.early, inner.invars, [*early_results, *handed], constants)
    second = function_of(steps.late, [*handed, *again], late_results, constants)

    def join(made: Iterable[Array], of: bool) -> Any:
        values = iter(made)
        leaves = [next(values) if is_late is of else None for is_late in late]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def early(*arguments: Any) -> tuple[Any, tuple[Array, ...]]:
        made = first(*jax.tree.leaves(arguments))
        return join(made, False), tuple(made[len(early_results) :])

    def later(handed_over: tuple[Array, ...], *arguments: Any) -> Any:
        return join(second(*handed_over, *jax.tree.leaves(arguments)), True)

    handed_shapes = jax.eval_shape(lambda *arguments: early(*arguments)[1], *arguments)
    return Halves(late, handed_shapes, early, later)


def _split(program: Any, is_late: Sequence[bool | None]) -> Steps:
    """Return the halves of a program.

    Args:
        program: Open program.
        is_late: For each result; None for a result that no half gives.
    """
    results = list(zip(program.outvars, is_late, strict=True))
    early_names = set(variables(name for name, late in results if late is False))
    late_names = set(variables(name for name, late in results if late))
    early: list[ProgramStep] = []
    late: list[ProgramStep] = []
    for equation in reversed(program.eqns):
        are_late = [
            False if name in early_names else True if name in late_names else None
            for name in equation.outvars
        ]
        if True not in are_late:
            if False not in are_late and not equation.effects:
                continue
            halves = [whole(equation)], []
        elif False not in are_late:
            halves = [], [whole(equation)]
        else:
            halves = _split_equation(equation, are_late)
        early += halves[0]
        late += halves[1]
        early_names.update(reads_of(halves[0]))
        late_names.update(reads_of(halves[1]))
    return begin_with_products(early[::-1], late[::-1])


def _split_equation(
    equation: Any, are_late: list[bool | None]
) -> tuple[list[ProgramStep], list[ProgramStep]]:
    """Return the halves of an equation with results of both kinds."""
    match equation.primitive.name:
        case "scan":
            return _split_loop(equation, are_late)
        case "shard_map":
            return _split_region(equation, are_late)
        case "jit" | "pjit" | "remat2" | "checkpoint":
            return _split_call(equation, are_late)
        case _:
            return [whole(equation)], []


def _split_call(
    equation: Any, are_late: list[bool | None]
) -> tuple[list[ProgramStep], list[ProgramStep]]:
    """Return the halves of a call, without the call."""
    inner, constants = open_program(equation.params["jaxpr"])
    # A rematerialised call whose products XLA might merge with those of the forward pass.
    has_barrier = equation.params.get("prevent_cse", False)

    def around(half: Callable[..., list[Any]], *_: Any) -> Callable[..., Any]:
        if not has_barrier:
            return half
        return lambda *values: half(*jax.lax.optimization_barrier(values))

    return _split_inside(equation, inner, constants, are_late, around)


def _split_region(
    equation: Any, are_late: list[bool | None]
) -> tuple[list[ProgramStep], list[ProgramStep]]:
    """Return the halves of a `shard_map`; what is handed over is stacked over its devices."""
    params = equation.params
    inner, constants = open_program(params["jaxpr"])
    in_specs = dict(zip(inner.invars, params["in_specs"], strict=True))
    out_specs = dict(zip(inner.outvars, params["out_specs"], strict=True))
    axes = params["newly_manual_axes"]

    def spec(name: Name) -> PartitionSpec:
        varying = name.aval.mat.varying if params["check_vma"] else axes
        return PartitionSpec(tuple(axis for axis in params["mesh"].axis_names if axis in varying))

    def around(
        half: Callable[..., list[Any]], reads: list[Name], results: list[tuple[Name, bool]]
    ) -> Callable[..., Any]:
        def body(*values: Any) -> list[Any]:
            pairs = zip(reads, values, strict=True)
            made = half(*(x if name in in_specs else x[0] for name, x in pairs))
            return [
                x[None] if is_handed else x for x, (_, is_handed) in zip(made, results, strict=True)
            ]

        return jax.shard_map(
            body,
            in_specs=tuple(in_specs[name] if name in in_specs else spec(name) for name in reads),
            out_specs=[spec(name) if is_handed else out_specs[name] for name, is_handed in results],
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )

    return _split_inside(equation, inner, constants, are_late, around)


def _split_inside(
    equation: Any,
    inner: Any,
    values_outside: Values,
    are_late: list[bool | None],
    around: Callable[[Callable[..., list[Any]], list[Name], list[tuple[Name, bool]]], Any],
) -> tuple[list[ProgramStep], list[ProgramStep]]:
    """Return the halves of an equation with a program inside that is executed once.

    Args:
        equation: The equation.
        inner: Open program.
        values_outside: Values of its constants.
        are_late: For each result.
        around: From a half of the program, the names that it reads, and the names of its results
            with whether they are handed over, to a function of values outside.
    """
    steps = _split(inner, are_late)
    outside = dict(zip(inner.invars, equation.invars, strict=True))
    handed = [name for name in steps.crossing if name not in outside and name not in values_outside]
    outside |= {name: Handed(name) for name in handed}
    pairs = list(zip(inner.outvars, equation.outvars, are_late, strict=True))
    made_late = steps.made_late
    late = [(name, out) for name, out, is_late in pairs if is_late and name in made_late]
    early = [
        (name, out)
        for name, out, is_late in pairs
        if is_late is not None and not (is_late and name in made_late)
    ]

    def half(
        part: list[ProgramStep], results: list[tuple[Name, Name]], last: list[Name]
    ) -> list[ProgramStep]:
        names = [name for name, _ in results]
        reads = [name for name in reads_of(part, [*names, *last]) if name not in values_outside]
        function = function_of(part, reads, [*names, *last], values_outside)
        flags = [(name, False) for name in names] + [(name, True) for name in last]
        return [
            ProgramStep(
                around(function, reads, flags),
                [outside[name] for name in reads],
                [out for _, out in results] + [outside[name] for name in last],
                has_product=True,
            )
        ]

    return half(steps.early, early, handed), half(steps.late, late, []) if late else []


def _split_loop(
    equation: Any, are_late: list[bool | None]
) -> tuple[list[ProgramStep], list[ProgramStep]]:
    """Return the halves of a `scan`; what is handed over is stacked over its turns."""
    params = equation.params
    inner, loop_constants = open_program(params["jaxpr"])
    num_constants, num_carry = loop_counts(params)
    outside = dict(zip(inner.invars, equation.invars, strict=True))
    carried = inner.invars[num_constants : num_constants + num_carry]
    stacked = set(inner.invars[num_constants + num_carry :])
    # A carry that one half needs is its own; that of the first half is handed to the second.
    early_results = _with_carries(inner, carried, [late is False for late in are_late])
    late_results = _with_carries(inner, carried, [late is True for late in are_late])
    kinds = [
        False if is_early else True if is_late else None
        for is_early, is_late in zip(early_results, late_results, strict=True)
    ]
    steps = _split(inner, kinds)
    made_late = steps.made_late
    kinds = [
        False if late and place >= num_carry and name not in made_late else late
        for place, (name, late) in enumerate(zip(inner.outvars, kinds, strict=True))
    ]
    loop_values = {
        late: [c for c, k in zip(carried, kinds, strict=False) if k is late]
        for late in (False, True)
    }
    late_names = [name for name, late in zip(inner.outvars, kinds, strict=True) if late]
    names_known = {*outside, *loop_constants} - set(loop_values[False])
    handed = [name for name in reads_of(steps.late, late_names) if name not in names_known]
    markers = {name: Handed(name, params["length"]) for name in handed}

    def half(part: list[ProgramStep], late: bool, last: list[Name]) -> list[ProgramStep]:
        carries = loop_values[late]
        places = [place for place, kind in enumerate(kinds) if kind is late]
        results = [inner.outvars[place] for place in places] + last
        reads = [name for name in reads_of(part, results) if name not in loop_constants]
        turns = [name for name in reads if name in markers or name in stacked]
        if not late:
            turns = [name for name in reads if name in stacked]
        same = [name for name in reads if name not in {*turns, *carries}]
        function = function_of(part, [*same, *carries, *turns], results, loop_constants)

        def run(*values: Any) -> list[Any]:
            constants = values[: len(same)]
            carry_values = values[len(same) :]

            def turn(carry: Any, slices: Any) -> tuple[Any, Any]:
                made = function(*constants, *carry, *slices)
                return tuple(made[: len(carries)]), tuple(made[len(carries) :])

            carry, made = jax.lax.scan(
                turn,
                tuple(carry_values[: len(carries)]),
                tuple(carry_values[len(carries) :]),
                length=params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )
            return [*carry, *made]

        names = [*same, *carries, *turns]
        inputs = [markers[name] if late and name in markers else outside[name] for name in names]
        outputs = [equation.outvars[place] for place in places] + [markers[name] for name in last]
        return [ProgramStep(run, inputs, outputs, has_product=True)]

    return half(steps.early, False, handed), half(steps.late, True, []) if late_names else []


def _with_carries(program: Any, carried: Sequence[Name], is_wanted: list[bool]) -> list[bool]:
    """Return which results of a turn are needed for some, with the carries that these need."""
    while True:
        names = set(variables(n for n, w in zip(program.outvars, is_wanted, strict=True) if w))
        for equation in reversed(program.eqns):
            if not names.isdisjoint(equation.outvars):
                names.update(variables(equation.invars))
        more = [
            w or (place < len(carried) and carried[place] in names)
            for place, w in enumerate(is_wanted)
        ]
        if more == is_wanted:
            return is_wanted
        is_wanted = more
