# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base of adapters that make n low-rank additions to a matrix and mix them for each token.

    y = x W + alpha / r * (mixture of x A_1 B_1 ... x A_n B_n)       see `mixtures.py`

Beside a matrix `q` stand `q:downs` [*I n r], `q:ups` [n r *O] and `q:scale`. Each half of a layer
(mixer, feed-forward) has one mixture for all its matrices, with parameters `mixer:<name>` and
`feed_forward:<name>`. Routed experts have no mixtures: their rows are sorted by expert, and those
of one expert would need different additions.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.adapters.base import Adapter, Layers, TargetsConfig, frozen, layers_of
from jaxmoe.adapters.factors import TRAINED, matrix_parts, own_row
from jaxmoe.declarations import Declaration, Role
from jaxmoe.layers.records import Half
from jaxmoe.layers.view import HalfInputs, Losses
from jaxmoe.parameters import FROZEN, Hyperparameters, ParameterSpec, ParameterTable
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.products.low_rank import Mix
from sharding.rules import LogicalAxisRules

FIXED: Final = dataclasses.replace(TRAINED, group=FROZEN)
"""Numbers of a parameter of an adapter that is not trained."""
Made = dict[str, tuple[Declaration, Hyperparameters]]
"""Parameters of half a layer, by name, without a dimension of layers."""

_HALVES: Final[Mapping[Role, Half]] = {
    "attention_in": "mixer",
    "attention_out": "mixer",
    "attention_gate": "mixer",
    "mlp_in": "feed_forward",
    "mlp_out": "feed_forward",
    "shared_in": "feed_forward",
    "shared_out": "feed_forward",
}
MIXED_ROLES: Final = tuple(_HALVES)
"""Roles of the matrices whose additions can differ from token to token."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FactorTraits:
    """Properties of the factors of all additions of an adapter."""

    are_trained: bool = True
    """The factors are trained, beside their mixture."""
    share: float = 1.0
    """Part of the factors with which one token is multiplied."""
    has_start: bool = False
    """The initial value of each `:downs` is kept, as `:start`; that of `:ups` is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixedAdapter(Adapter):
    """Several low-rank additions to each target, mixed for each token; all else is frozen."""

    can_go_on: ClassVar[bool] = True

    members: int = 4
    """Additions to each matrix."""
    rank: int = 8
    """Inner width of the factors of one addition."""
    alpha: float
    """The mixture is multiplied with alpha / rank."""
    targets: TargetsConfig = TargetsConfig()
    """Matrices that are adapted: of attention, dense feed-forwards, shared experts."""

    def __post_init__(self):
        for field in ("members", "rank"):
            if getattr(self, field) < 1:
                raise ValueError(f"adapter.{field}={getattr(self, field)} must be at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"adapter.alpha={self.alpha} must be above 0")
        if unmixed := [role for role in self.targets.roles if role not in _HALVES]:
            raise self._unmixable(
                f"{' and '.join(unmixed)} cannot differ by token",
                f"name some of {', '.join(_HALVES)}",
            )
        self.check_fields()

    def _unmixable(self, reason: str, way_out: str) -> ValueError:
        """Return the error of targets whose additions cannot differ from token to token."""
        return ValueError(
            f"adapter.targets.roles={self.targets.roles}: {reason}, and adapter:{self.name} mixes"
            f" additions for each token: {way_out}, or take adapter:lora"
        )

    def check_fields(self) -> None:
        """Raise a ValueError for invalid values of a member's own fields."""

    @property
    def words(self) -> str:
        """The adapter in words, for the header of a run."""
        return (
            f"{self.name} of {self.members} additions of rank {self.rank}, alpha {self.alpha:g},"
            f" on {' '.join(self.targets.roles)}"
        )

    @abc.abstractmethod
    def mix(
        self, params: dict[str, Array], half: HalfInputs, placement: Placement, *, train: bool
    ) -> tuple[Mix | None, Losses]:
        """Return the mixture and losses of half a layer; see `jaxmoe.layers.view.ParameterView`."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks; 0 where the mixture does not depend on tasks."""
        return 0

    @property
    def factor_traits(self) -> FactorTraits:
        """Properties of the factors of all additions."""
        return FactorTraits()

    def half_parameters(self, width: int) -> Made:
        """Return the parameters on which the mixture of half a layer depends.

        Args:
            width: D, width of the stream.
        """
        del width
        return {}

    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the table with frozen rows, factors and mixtures; see `Adapter.table`."""
        targets = [
            row for row in base if self.targets.has(row) and row.declaration.matrix is not None
        ]
        self.targets.check_found(targets, base)
        self._check_mixable(targets)
        rows = [frozen(row) for row in base]
        halves: dict[tuple[str, Half], ParameterSpec] = {}
        for row in targets:
            stack = next(path for path, _ in layers if row.path.startswith(f"{path}/"))
            is_adapted = self.targets.layers_in(layers_of(row, layers))
            if any(is_adapted):
                rows += _rows(row.path, self._factors(row, is_adapted), rules)
                halves.setdefault((stack, _HALVES[row.declaration.role]), row)
        if not halves:
            raise ValueError(
                f"adapter.targets.layers={self.targets.layers} names no layer with"
                f" {' or '.join(self.targets.roles)}: layers are numbered from 0"
            )
        for (stack, half), row in halves.items():
            own_rows = {
                name: (_stack(declaration, row), hyper)
                for name, (declaration, hyper) in self.half_parameters(_width(row)).items()
            }
            rows += _rows(f"{stack}/{half}", own_rows, rules)
        return ParameterTable(tuple(sorted(rows, key=lambda row: row.path)))

    def _check_mixable(self, targets: Sequence[ParameterSpec]) -> None:
        """Refuse matrices that their layer uses whole.

        Args:
            targets: Parameters that are adapted.

        Raises:
            ValueError: There is one.
        """
        merged = [row for row in targets if row.declaration.is_whole]
        if merged:
            roles = sorted({row.declaration.role for row in merged})
            raise self._unmixable(
                f"{merged[0].path} is used whole by its layer",
                f"leave {' and '.join(roles)} out, name other matrices with"
                " adapter.targets.pattern",
            )

    def _factors(self, row: ParameterSpec, is_adapted: list[bool]) -> Made:
        """Return the factors of one parameter, and their scale in each layer."""
        declaration = row.declaration
        inputs, outputs, batch, first, last = matrix_parts(declaration)
        inner = (self.members, self.rank)
        axes = (ax.RANK, ax.RANK)
        traits = self.factor_traits
        down = Declaration(
            shape=(*declaration.shape[first], *inner),
            axes=(*declaration.axes[first], *axes),
            role="adapter",
            matrix=(tuple(range(-inputs - 2, -2)), (-2, -1)),
            share=traits.share,
        )
        up = Declaration(
            shape=(*declaration.shape[:batch], *inner, *declaration.shape[last]),
            axes=(*declaration.axes[:batch], *axes, *declaration.axes[last]),
            role="adapter",
            matrix=((-outputs - 2, -outputs - 1), tuple(range(-outputs, 0))),
            init="zeros",
            share=traits.share,
        )
        scales = tuple(self.alpha / self.rank if has_adapter else 0.0 for has_adapter in is_adapted)
        scale = Declaration(
            shape=declaration.shape[:batch],
            axes=declaration.axes[:batch],
            role="adapter",
            matrix=None,
            init=scales,
        )
        hyper = TRAINED if traits.are_trained else FIXED
        made = {"downs": (down, hyper), "ups": (up, hyper), "scale": (scale, FIXED)}
        return made | ({"start": (down, FIXED)} if traits.has_start else {})


def task_ids(half: HalfInputs, task: int) -> Int[Array, "B S"]:
    """Return the task of each token.

    Args:
        half: Input of half a layer.
        task: Task of tokens where the batch names none.
    """
    if "task" in half.context:
        return half.context["task"].astype(jnp.int32)
    return jnp.zeros_like(half.context["index"]) + jnp.int32(task)


def _width(row: ParameterSpec) -> int:
    """Return the width of the stream, an input or output of every matrix that can be adapted."""
    return row.shape[row.declaration.axes.index(ax.EMBED)]


def _stack(declaration: Declaration, row: ParameterSpec) -> Declaration:
    """Return the declaration of a parameter of all layers of a stack.

    Args:
        declaration: That of one layer.
        row: Parameter of the stack.
    """
    if not row.declaration.is_stacked:
        return declaration
    return dataclasses.replace(
        declaration,
        shape=(row.shape[0], *declaration.shape),
        axes=(row.declaration.axes[0], *declaration.axes),
    )


def _rows(path: str, made: Made, rules: LogicalAxisRules) -> list[ParameterSpec]:
    """Return the rows `<path>:<name>` of parameters beside one."""
    rows = [own_row(f"{path}:{name}", *pair, rules) for name, pair in made.items()]
    return [
        dataclasses.replace(row, drawn_as=f"{path}:downs") if row.path.endswith(":start") else row
        for row in rows
    ]
