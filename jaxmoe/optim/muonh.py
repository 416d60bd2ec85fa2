# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MuonH: Muon's directions on the sphere of each matrix, the optimiser of HyperP.

    muonh    matrices on their spheres     adamh    the head on its sphere     adamw    all else

The steps along a sphere and their sources: `jaxmoe/optim/hypersphere.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import optax

from jaxmoe.optim.adamw import ADAM, adam_directions, adamw, adamw_group
from jaxmoe.optim.groups import GroupMembers, GroupTraits, RoleGroups
from jaxmoe.optim.hypersphere import Sphere, on_sphere
from jaxmoe.optim.matrices import beside, stacked_axes
from jaxmoe.optim.muon import ComputeDtype, Form, MatrixOptimizer, muon_directions, scale_by_muon
from jaxmoe.optim.newton_schulz import Coefficients
from jaxmoe.optim.steps import Number, Rate, check_numbers, standard_promotion
from jaxmoe.parameters import Group
from sharding.products.whole_matrices import MatrixLayout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuonHConfig(MatrixOptimizer):
    """Muon on spheres for matrices, Adam on a sphere for the head, AdamW for all else: HyperP."""

    name: ClassVar[str] = "muonh"
    groups: ClassVar[Mapping[Group, GroupTraits]] = {
        "muonh": GroupTraits(
            moments_per_parameter=1,
            has_whole_matrices=True,
            takes_vectors=False,
            takes_zeros=False,
        ),
        "adamh": GroupTraits(moments_per_parameter=2, takes_vectors=False, takes_zeros=False),
        "adamw": ADAM,
    }
    role_groups: ClassVar[RoleGroups] = RoleGroups(matrices="muonh", head="adamh")
    parameterizations: ClassVar[tuple[str, ...]] = ("hyperp", "muonh_vanilla")

    learning_rate: float = 0.014
    """Peak share of a matrix's norm per step; the schedule and the role's multiplier multiply
    it."""
    weight_decay: float = 0.0
    """Decoupled weight decay of all groups, times the role's multiplier; a change of the second
    order on a sphere."""
    sphere: Sphere = "matrix"
    """One sphere per matrix, or one for all experts of a layer (the reading of HyperP's code)."""

    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return MuonH, AdamH or AdamW for the group."""
        if members.group == "adamw":
            return adamw_group(members, self)
        if members.group == "adamh":
            directions = adam_directions(members, self)
        else:
            directions = muon_directions(self, members, None)
        steps = on_sphere(
            members.rate,
            matrix_axes=members.matrix_axes(),
            sphere=self.sphere,
            weight_decay=members.decays(self.weight_decay),
            multiplier=members.multipliers(),
            name=members.group,
        )
        return optax.chain(directions, steps)


def muonh(
    learning_rate: Rate,
    *,
    matrix_axes: Any = None,
    sphere: Sphere = "matrix",
    momentum: Number = 0.95,
    nesterov: bool = True,
    form: Form = "sum",
    coefficients: Coefficients = "dion",
    weight_decay: Number = 0.0,
    epsilon: Number = 1e-8,
    dtype: ComputeDtype = "auto",
    layout: MatrixLayout = "spread",
    other_optimizer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Return Muon on the Frobenius sphere for the matrices of any tree, and AdamW for the rest.

    A scale of the directions would cancel. HyperP has AdamW for embeddings (None in `matrix_axes`)
    and `adamh` for the head.

    Args:
        learning_rate: Share of the matrix's norm per step; a number, or a function of the step.
        matrix_axes: Dimensions that form the matrix, as for `muon`. All others count matrices.
        sphere: "matrix", one per matrix; or "stack", one over all batch dimensions but the first,
            which counts layers: it changes nothing in [E in out].
        momentum: Momentum of the gradients.
        nesterov: Whether to look ahead by one step.
        form: Form of the momentum, "sum" or "ema".
        coefficients: Newton-Schulz coefficients, "dion" or "standard".
        weight_decay: Decay, times the learning rate; its effect is of the second order.
        epsilon: Number added to the norm before Newton-Schulz.
        dtype: Dtype of Newton-Schulz; auto: bfloat16 on accelerators, float32 on the CPU.
        layout: Layout of Newton-Schulz on an Explicit mesh.
        other_optimizer: Transformation of vectors, scalars and parameters whose pair is None;
            `adamw(learning_rate, weight_decay=weight_decay)` when None.

    Raises:
        ValueError: Same conditions as `muon`; and at `init` a zero matrix.
    """
    check_numbers(weight_decay=weight_decay)
    direction = scale_by_muon(
        matrix_axes=stacked_axes(matrix_axes),
        momentum=momentum,
        nesterov=nesterov,
        form=form,
        coefficients=coefficients,
        epsilon=epsilon,
        dtype=dtype,
        layout=layout,
        name="muonh",
    )
    steps = on_sphere(
        learning_rate,
        matrix_axes=stacked_axes(matrix_axes),
        sphere=sphere,
        weight_decay=weight_decay,
        name="muonh",
    )
    return beside(
        standard_promotion(optax.chain(direction, steps), stays_finite=True),
        other_optimizer or adamw(learning_rate, weight_decay=weight_decay),
        matrix_axes,
        "muonh",
    )
