# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Stores the weights of many matrices in fewer cells (STABLE-RPS, arXiv 2310.11611).

    W_i = s g_i M[(offset(i // m) + i) mod m]      g_i = +-1 and offsets by a seed
    s   = wanted std / initial std of M            gradient of a cell = mean over its uses

i counts the weights of all target matrices of all layers, n in total, M has m cells. Each run of m
weights uses every cell once, so that a cell has n/m uses, rounded down or up, and n cells are a
permutation of the weights. The scaling of the gradient is one reading: the source leaves it open.

The table has M in place of the matrices, which a layer makes where it uses them, and beside each
`<matrix>:stored_<shape>`: the number of its first weight, in digits of base 256, and s. The other
parameters are trained as without a store.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Float, UInt32

from jaxmoe.adapters.base import Adapter, Layers, TargetsConfig
from jaxmoe.declarations import Declaration
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.view import Tree
from jaxmoe.parameters import FROZEN, Hyperparameters, ParameterSpec, ParameterTable
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

STORE: Final = "adapter:store"
CELLS: Final = "cells"
MARK: Final = ":stored_"
"""Middle of the name of what a matrix reads from the store."""
DIGITS: Final = 4  # of base 256, each exact in bfloat16


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedStoreConfig(Adapter):
    """Matrices made of fewer trained cells, from the first step on (STABLE-RPS)."""

    name: ClassVar[str] = "shared_store"
    has_view: ClassVar[bool] = True

    compression: float = 4.0
    """Weights per cell; 1 has as many cells as weights."""
    seed: int = 0
    """Seed of offsets and signs."""
    targets: TargetsConfig = TargetsConfig(
        roles=("attention_in", "attention_out", "mlp_in", "mlp_out", "shared_in", "shared_out")
        + ("expert_in", "expert_out")
    )
    """Matrices that are stored, in all layers."""

    def __post_init__(self):
        if not 0.0 < self.compression < math.inf:
            raise ValueError(f"adapter.compression={self.compression} must be above 0, and finite")
        if self.targets.layers:
            raise ValueError(
                f"adapter.targets.layers={self.targets.layers}: layers are one array, and a store"
                " holds all of them: leave it out"
            )

    @property
    def words(self) -> str:
        """The adapter in words, for the header of a run."""
        return f"shared_store, {self.compression:g} weights per cell, trained from the first step"

    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the table with a store in place of the targets; see `Adapter.table`."""
        del layers
        targets = [row for row in base if self.targets.has(row) and row.init_std > 0.0]
        self.targets.check_found(targets, base)
        total = sum(row.size for row in targets)
        if total >= 2**32:
            raise ValueError(f"adapter:shared_store counts {total} weights, at most {2**32 - 1}")
        cells = max(1, math.ceil(total / self.compression))
        hyperparameters = (
            targets[0].hyper if targets[0].hyper.group == "adamw" else Hyperparameters()
        )
        hyper = dataclasses.replace(hyperparameters, init_std=targets[0].init_std, fan_in_power=0.0)
        store = Declaration(shape=(cells,), axes=(ax.RANK,), role="adapter", matrix=None)
        rows = [row for row in base if row not in targets]
        path = f"{STORE}/{CELLS}"
        spec = rules.resolve(store.axes)
        rows.append(ParameterSpec(path=path, declaration=store, hyper=hyper, spec=spec))
        first = 0
        for row in targets:
            rows.append(_marks(row, first, row.init_std / targets[0].init_std, rules))
            first += row.size
        return ParameterTable(tuple(sorted(rows, key=lambda row: row.path)))

    def prepare(self, params: Any, layers: Layers, key: Array | None = None) -> Any:
        """Return the parameters with cells whose gradients are divided by their uses."""
        del layers, key
        flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
        marks = [(path, marks) for path, marks in flat.items() if MARK in path]
        total = sum(marks.size // (DIGITS + 1) * math.prod(_shape(path)) for path, marks in marks)
        cells = params[STORE][CELLS]
        uses = uses_of(cells.size, total, self.seed)
        return params | {STORE: {CELLS: _divide(cells, uses.astype(cells.dtype))}}

    def rewrite(self, params: Tree, shared: Tree, part: str) -> Tree:
        """Return the parameters of one layer with the matrices of its cells."""
        del part
        flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
        cells = shared[STORE][CELLS]
        for path in [path for path in flat if MARK in path]:
            marks = flat.pop(path)
            shape = _shape(path)
            numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32) + _number(marks[:DIGITS])
            places, signs = places_of(numbers, cells.size, self.seed)
            values = cells[places] * signs.astype(cells.dtype) * marks[DIGITS].astype(cells.dtype)
            flat[path.partition(MARK)[0]] = values.reshape(shape)
        return traverse_util.unflatten_dict(flat, sep="/")


def places_of(
    numbers: UInt32[Array, " n"], cells: int, seed: int
) -> tuple[UInt32[Array, " n"], Float[Array, " n"]]:
    """Return the cells and the signs of weights, from their numbers."""
    run = numbers // jnp.uint32(cells)
    remainder = numbers % jnp.uint32(cells)
    signs = _mix(numbers ^ _mix(jnp.uint32(seed % 2**32))) >> 31
    places = (_offset(run, cells, seed) + remainder) % jnp.uint32(cells)
    return places, 1.0 - 2.0 * signs.astype(jnp.float32)


def uses_of(cells: int, total: int, seed: int) -> Float[Array, " m"]:
    """Return the number of weights of each cell, at least 1."""
    quotient, remainder = divmod(total, cells)
    start = _offset(jnp.uint32(quotient), cells, seed)
    places = jnp.arange(cells, dtype=jnp.uint32)
    from_start = (places + (jnp.uint32(cells) - start)) % jnp.uint32(cells)
    uses = quotient + (from_start < remainder).astype(jnp.float32)
    return jnp.maximum(uses, 1.0)


def _offset(run: UInt32[Array, ...], cells: int, seed: int) -> UInt32[Array, ...]:
    return _mix(run + _mix(jnp.uint32((seed + 1) % 2**32))) % jnp.uint32(cells)


def _mix(x: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """Return the bits of numbers mixed, by the last steps of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


@jax.custom_vjp
def _divide(cells: Array, uses: Array) -> Array:
    """Return the cells; their gradient is divided by the uses."""
    del uses
    return cells


_divide.defvjp(lambda cells, uses: (cells, uses), lambda uses, g: (g / uses, None))


def _shape(path: str) -> tuple[int, ...]:
    return tuple(int(size) for size in path.partition(MARK)[2].split("x"))


def _number(digits: Array) -> UInt32[Array, ""]:
    powers = 256 ** jnp.arange(DIGITS, dtype=jnp.uint32)
    return jnp.sum(digits.astype(jnp.uint32) * powers, dtype=jnp.uint32)


def _marks(row: ParameterSpec, first: int, s: float, rules: LogicalAxisRules) -> ParameterSpec:
    """Return the row of what a matrix reads from the store, [L 5] or [5]."""
    row_declaration = row.declaration
    layers, shape = (
        (row.shape[:1], row.shape[1:]) if row_declaration.is_stacked else ((), row.shape)
    )
    numbers = [first + layer * math.prod(shape) for layer in range(math.prod(layers))]
    values = [(*((n >> 8 * d) % 256 for d in range(DIGITS)), s) for n in numbers]
    declaration = Declaration(
        shape=(*layers, DIGITS + 1),
        axes=(*row_declaration.axes[: len(layers)], ax.RANK),
        role="adapter",
        matrix=None,
        init=tuple(float(value) for each in values for value in each),
    )
    return ParameterSpec(
        path=f"{row.path}{MARK}{'x'.join(map(str, shape))}",
        declaration=declaration,
        hyper=Hyperparameters(weight_decay_multiplier=0.0, group=FROZEN),
        spec=rules.resolve(declaration.axes),
    )
