# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimisers for tables whose matrices have groups of their own.

    muon     muon: Muon's matrices          adamw: all else
    muonh    muonh: matrices on spheres     adamh: the head on its sphere     adamw: all else

Which parameter is in which group is the parameterisation's decision; a table without any matrix for
the optimiser is refused, and so is a sphere of radius 0. The state of each group stands under its
name.

To add one: see `jaxmoe/optim/groups.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Literal

import optax
from jaxtyping import Array, Float

from jaxmoe.optim.adamw import standard_promotion
from jaxmoe.optim.groups import (
    Members,
    adamw_group,
    check_fields,
    check_groups,
    flat_steps,
    scale_by_adam,
)
from jaxmoe.optim.hypersphere import Sphere, on_sphere
from jaxmoe.optim.muon import ComputeDtype, Form, Scale, scale_by_muon
from jaxmoe.optim.newton_schulz import Coefficients
from jaxmoe.optim.schedules import Schedule
from jaxmoe.parameters import Group, ParameterTable
from sharding.products.whole_matrices import MatrixLayout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """Muon for matrices, AdamW for all else."""

    name: ClassVar[str] = "muon"

    learning_rate: float = 0.02
    """Peak, of the matrices; the schedule and the role's multiplier multiply it."""
    adamw_ratio: float = 1.0
    """Learning rate of the AdamW group over that of the matrices."""
    momentum: float = 0.95
    """Of the matrices' gradients."""
    is_nesterov: bool = True
    """Look ahead by one step of momentum."""
    form: Form = "sum"
    """Of the momentum: HyperP's sum of gradients, or optax's average without start-up bias."""
    coefficients: Coefficients = "dion"
    """Of Newton-Schulz: dion ends close to orthogonal, standard is Muon's first."""
    scale: Scale | None = "spectral_norm"
    """By fan-out and fan-in: spectral_norm sqrt(out / in), rms_norm 0.2 sqrt(max(out, in)),
    clip_norm sqrt(max(1, out / in)), or 1."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    epsilon: float = 1e-8
    """Of AdamW, where the role's multiplier multiplies it, and of Newton-Schulz."""
    weight_decay: float = 1e-3
    """Of all groups, decoupled; the role's multiplier multiplies it. HyperP's Muon baseline has
    1e-3 and an independent decay; 0.1 is usual where the learning rate multiplies it."""
    dtype: ComputeDtype = "auto"
    """Of Newton-Schulz; auto: bfloat16 on accelerators, float32 on the CPU."""
    layout: MatrixLayout = "spread"
    """On a mesh: spread the matrices over the devices, or let each gather and compute all."""

    def __post_init__(self):
        check_fields(self)

    def build(
        self,
        table: ParameterTable,
        schedule: Schedule,
        *,
        learning_rate: Float[Array, ""] | None = None,
    ) -> optax.GradientTransformation:
        """The optimiser of a model.

        Args:
            table: multipliers and groups of its parameters.
            schedule: factor on the learning rate by step.
            learning_rate: peak, where it is an argument of the compiled step; the config's when
                None.

        Raises:
            ValueError: a parameter in a group that this optimiser does not have or that cannot
                hold it, or no parameter for Muon.
        """
        _check(table, "muon", ("muon", "adamw"))
        peak = self.learning_rate if learning_rate is None else learning_rate
        muon, adamw = (
            Members(table=table, group=group, schedule=schedule, peak=rate)
            for group, rate in _rates(peak, self.adamw_ratio, "muon")
        )
        directions = _muon_directions(self, muon, self.scale)
        groups = {
            "muon": flat_steps(muon, directions, self.weight_decay),
            "adamw": adamw_group(adamw, self),
        }
        return _partition(table, groups)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuonHConfig:
    """Muon on spheres for matrices, Adam on a sphere for the head, AdamW for all else: HyperP."""

    name: ClassVar[str] = "muonh"

    learning_rate: float = 0.014
    """Peak, of a matrix's own norm; the schedule and the role's multiplier multiply it."""
    adamw_ratio: float = 1.0
    """Learning rate of the AdamW group over that of the matrices."""
    momentum: float = 0.95
    """Of the matrices' gradients."""
    is_nesterov: bool = True
    """Look ahead by one step of momentum."""
    form: Form = "sum"
    """Of the momentum: HyperP's sum of gradients, or optax's average without start-up bias."""
    coefficients: Coefficients = "dion"
    """Of Newton-Schulz: dion ends close to orthogonal, standard is Muon's first."""
    sphere: Sphere = "matrix"
    """One per matrix, or one for all experts of a layer (the reading of HyperP's code)."""
    beta1: float = 0.9
    """Decay of the first moment of AdamH and AdamW."""
    beta2: float = 0.95
    """Decay of their second moment."""
    epsilon: float = 1e-8
    """Of AdamH and AdamW, where the role's multiplier multiplies it, and of Newton-Schulz."""
    weight_decay: float = 0.0
    """Of all groups, decoupled; the role's multiplier multiplies it. No more than a change of the
    second order on a sphere."""
    dtype: ComputeDtype = "auto"
    """Of Newton-Schulz; auto: bfloat16 on accelerators, float32 on the CPU."""
    layout: MatrixLayout = "spread"
    """On a mesh: spread the matrices over the devices, or let each gather and compute all."""

    def __post_init__(self):
        check_fields(self)

    def build(
        self,
        table: ParameterTable,
        schedule: Schedule,
        *,
        learning_rate: Float[Array, ""] | None = None,
    ) -> optax.GradientTransformation:
        """The optimiser of a model.

        Args:
            table: multipliers and groups of its parameters.
            schedule: factor on the learning rate by step.
            learning_rate: peak, where it is an argument of the compiled step; the config's when
                None.

        Raises:
            ValueError: a parameter in a group that this optimiser does not have or that cannot
                hold it (a vector, or a matrix that starts at zero), or no parameter for MuonH.
        """
        _check(table, "muonh", ("muonh", "adamh", "adamw"))
        peak = self.learning_rate if learning_rate is None else learning_rate
        muonh, adamh, adamw = (
            Members(table=table, group=group, schedule=schedule, peak=rate)
            for group, rate in _rates(peak, self.adamw_ratio, "muonh", "adamh")
        )
        groups = {
            "muonh": optax.chain(_muon_directions(self, muonh, None), self._steps(muonh)),
            "adamh": optax.chain(scale_by_adam(adamh, self), self._steps(adamh)),
            "adamw": adamw_group(adamw, self),
        }
        return _partition(table, groups)

    def _steps(self, members: Members) -> optax.GradientTransformation:
        return on_sphere(
            members.rate,
            matrix_axes=_matrix_axes(members),
            sphere=self.sphere,
            weight_decay=members.decays(self.weight_decay),
            multiplier=members.multipliers(),
            name=members.group,
        )


_SPHERES: tuple[Group, ...] = ("muonh", "adamh")
_FOR: dict[Literal["muon", "muonh"], str] = {
    "muon": "parameterization:mup_muon or parameterization:mup_plus_plus_muon",
    "muonh": "parameterization:hyperp or parameterization:muonh_vanilla",
}
"""The parameterisations that fill the group of the name."""


def _rates(peak: Any, adamw_ratio: float, *matrices: Group) -> list[tuple[Group, Any]]:
    return [*((group, peak) for group in matrices), ("adamw", peak * adamw_ratio)]


def _matrix_axes(members: Members) -> dict[str, Any]:
    return members.tree(lambda row: row.declaration.matrix)


def _muon_directions(
    config: MuonConfig | MuonHConfig, members: Members, scale: Scale | None
) -> optax.GradientTransformation:
    return scale_by_muon(
        matrix_axes=_matrix_axes(members),
        momentum=config.momentum,
        nesterov=config.is_nesterov,
        form=config.form,
        coefficients=config.coefficients,
        scale=scale,
        epsilon=config.epsilon,
        dtype=config.dtype,
        layout=config.layout,
        name=members.group,
    )


def _check(
    table: ParameterTable, name: Literal["muon", "muonh"], groups: tuple[Group, ...]
) -> None:
    check_groups(table, name, groups)
    if all(row.hyper.group != name for row in table):
        raise ValueError(
            f"the optimizer {name!r} is for parameters of the group {name}, and the"
            f" parameterization puts none there: choose {_FOR[name]}, or"
            " optimizer:adamw"
        )
    for row in table:
        group = row.hyper.group
        if group != "adamw" and row.declaration.matrix is None:
            raise ValueError(
                f"{row.path} is a vector, and the group {group} is for matrices: the"
                f" parameterization must put the role {row.declaration.role!r} into adamw"
            )
        is_zero = row.declaration.init == "zeros" or row.hyper.init_std == 0.0
        if group in _SPHERES and is_zero:
            raise ValueError(
                f"{row.path} starts at zero, and {group} keeps the norm that a matrix begins with,"
                f" so it would stay zero: the parameterization must put the role"
                f" {row.declaration.role!r} into adamw, or start it elsewhere"
            )


def _partition(
    table: ParameterTable, groups: Mapping[str, optax.GradientTransformation]
) -> optax.GradientTransformation:
    labels = table.tree(lambda row: row.hyper.group)
    present = {row.hyper.group for row in table}
    kept: dict[Hashable, optax.GradientTransformation] = {
        name: group for name, group in groups.items() if name in present
    }
    return standard_promotion(optax.partition(kept, labels))
