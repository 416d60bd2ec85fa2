# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Muon: the momentum of each matrix, orthogonalised by Newton-Schulz.

    sum (HyperP's code)   M = mu M + G              V = G + mu M
    ema (optax)           M = mu M + (1 - mu) G     V = mu M / c(t + 1) + (1 - mu) G / c(t)
    W = W - lr * (s * newton_schulz(V) + decay * W)

with c(t) = 1 - mu^t and t from 1. Without Nesterov V is M, in the second form over c(t). The forms
differ by a constant factor, which Newton-Schulz removes, and in the weights of the first
1 / (1 - mu) steps. The scale s of a matrix of fan_in inputs and fan_out outputs:

    spectral_norm  sqrt(fan_out / fan_in)            rms_norm  0.2 sqrt(max(fan_in, fan_out))
    clip_norm      sqrt(max(1, fan_out / fan_in))    None      1

`clip_norm` is optax's width factor, `rms_norm` its `consistent_rms=0.2` (arXiv 2502.16982).

The momentum has the layout of the parameters; Newton-Schulz receives whole matrices from
`sharding.products.whole_matrices`. Sources: K. Jordan et al., Muon, 2024; arXiv 2603.28743 and its
code. Matrices on a sphere: `jaxmoe/optim/muonh.py`. To add a scale: `shape_scale` in
`jaxmoe/optim/muon.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxmoe.optim.adamw import ADAM, adamw, adamw_group
from jaxmoe.optim.groups import GroupMembers, GroupTraits, Optimizer, RoleGroups
from jaxmoe.optim.matrices import Matrix, beside, matrices_of, stacked_axes
from jaxmoe.optim.newton_schulz import Coefficients, newton_schulz
from jaxmoe.optim.steps import Number, Rate, check_numbers, standard_promotion, straight_steps
from jaxmoe.parameters import Group
from jaxmoe.precision import PrecisionPolicy
from sharding.products.whole_matrices import MatrixLayout, map_matrices

Form = Literal["sum", "ema"]
Scale = Literal["spectral_norm", "rms_norm", "clip_norm"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NewtonSchulzConfig:
    """Newton-Schulz iteration, by which matrices become orthogonal."""

    coefficients: Coefficients = "dion"
    """dion ends close to orthogonal; standard is Muon's first."""
    dtype: ComputeDtype = "auto"
    """Dtype of the products; auto: bfloat16 on accelerators, float32 on the CPU."""
    layout: MatrixLayout = "spread"
    """Layout on a mesh: spread the matrices over the devices, or gather and compute all on each."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixOptimizer(Optimizer):
    """Base of optimisers with Muon for matrices and AdamW for all else."""

    stays_finite: ClassVar[bool] = True

    learning_rate: float
    """Peak learning rate of the matrices."""
    adamw_ratio: float = 1.0
    """Learning rate of the AdamW group over that of the matrices."""
    momentum: float = 0.95
    """Momentum of the matrices' gradients."""
    is_nesterov: bool = True
    """Look ahead by one step of momentum."""
    form: Form = "sum"
    """Form of the momentum: HyperP's sum of gradients, or optax's bias-corrected average."""
    beta1: float = 0.9
    """Decay rate for Adam's first moment."""
    beta2: float = 0.95
    """Decay rate for Adam's second moment."""
    epsilon: float = 1e-8
    """Epsilon of Adam, times the role's multiplier, and of Newton-Schulz."""
    weight_decay: float
    """Decoupled weight decay of all groups."""
    newton_schulz: NewtonSchulzConfig | None = None
    """Iteration that makes matrices orthogonal; None for the default one."""

    def rate_ratio(self, group: Group) -> float:
        """Return `adamw_ratio` for the group of AdamW, 1 for the others."""
        return self.adamw_ratio if group == "adamw" else 1.0

    @property
    def iteration(self) -> NewtonSchulzConfig:
        """Iteration that makes matrices orthogonal."""
        return self.newton_schulz or NewtonSchulzConfig()

    def resolve_dtype(self, compute: Literal["float32", "bfloat16"]) -> Any:
        """Return the config with the dtype "auto" replaced by that of a platform."""
        if self.iteration.dtype != "auto":
            return self
        iteration = dataclasses.replace(self.iteration, dtype=compute)
        return dataclasses.replace(self, newton_schulz=iteration)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig(MatrixOptimizer):
    """Muon for matrices, AdamW for all else."""

    name: ClassVar[str] = "muon"
    groups: ClassVar[Mapping[Group, GroupTraits]] = {
        "muon": GroupTraits(moments_per_parameter=1, has_whole_matrices=True, takes_vectors=False),
        "adamw": ADAM,
    }
    role_groups: ClassVar[RoleGroups] = RoleGroups(matrices="muon")
    parameterizations: ClassVar[tuple[str, ...]] = ("mup_muon", "mup_plus_plus_muon")

    learning_rate: float = 0.02
    """Peak learning rate for matrices; the schedule and the role's multiplier multiply it."""
    weight_decay: float = 1e-3
    """Decoupled weight decay of all groups, times the role's multiplier. HyperP's Muon baseline has
    1e-3 and an independent decay; 0.1 is usual if the learning rate multiplies it."""
    scale: Scale | None = "spectral_norm"
    """Scale by fan-out and fan-in: spectral_norm sqrt(out / in), rms_norm 0.2 sqrt(max(out, in)),
    clip_norm sqrt(max(1, out / in)), or 1."""

    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return Muon or AdamW for the group."""
        if members.group == "adamw":
            return adamw_group(members, self)
        return straight_steps(
            muon_directions(self, members, self.scale),
            members.rate,
            weight_decay=members.decays(self.weight_decay),
            multiplier=members.multipliers(),
        )


def muon_directions(
    config: MatrixOptimizer, members: GroupMembers, scale: Scale | None
) -> optax.GradientTransformation:
    """Return Muon's directions for a group.

    Args:
        config: Optimiser of the group.
        members: The group.
        scale: Scale of the directions.
    """
    iteration = config.iteration
    return scale_by_muon(
        matrix_axes=members.matrix_axes(),
        momentum=config.momentum,
        nesterov=config.is_nesterov,
        form=config.form,
        coefficients=iteration.coefficients,
        scale=scale,
        epsilon=config.epsilon,
        dtype=iteration.dtype,
        layout=iteration.layout,
        name=members.group,
    )


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    count: Int[Array, ""]
    momentum: Any
    """Tree like the parameters, float32."""


def shape_scale(scale: Scale | None, matrix: Matrix) -> float:
    """Return the factor on an orthogonal matrix of this shape; 1 for one without elements."""
    if not matrix.fan_in * matrix.fan_out:
        return 1.0
    match scale:
        case "spectral_norm":
            return math.sqrt(matrix.fan_out / matrix.fan_in)
        case "rms_norm":
            return 0.2 * math.sqrt(max(matrix.fan_in, matrix.fan_out))
        case "clip_norm":
            return math.sqrt(max(1.0, matrix.fan_out / matrix.fan_in))
        case None:
            return 1.0


def scale_by_muon(
    *,
    matrix_axes: Any = (-2, -1),
    momentum: Number = 0.95,
    nesterov: bool = True,
    form: Form = "sum",
    coefficients: Coefficients = "dion",
    scale: Scale | None = None,
    epsilon: Number = 1e-8,
    dtype: ComputeDtype = "auto",
    layout: MatrixLayout = "spread",
    name: str = "muon",
) -> optax.GradientTransformation:
    """Return the transformation from gradients to orthogonal directions.

    Args:
        matrix_axes: Dimensions that form the matrices; see `jaxmoe.optim.matrices`.
        momentum: Momentum mu.
        nesterov: Whether to look ahead by one step.
        form: Form of the momentum.
        coefficients: Newton-Schulz coefficients.
        scale: Scale of the directions.
        epsilon: Number added to the norm before Newton-Schulz.
        dtype: Dtype of Newton-Schulz.
        layout: Layout of Newton-Schulz on a mesh.
        name: Name of the optimiser, for errors.

    Raises:
        ValueError: A momentum outside [0, 1), or an unknown name.
    """
    check_numbers(momentum=momentum)
    for field, value, choices in (
        ("form", form, get_args(Form)),
        ("coefficients", coefficients, get_args(Coefficients)),
        ("scale", scale, (*get_args(Scale), None)),
        ("layout", layout, get_args(MatrixLayout)),
    ):
        if value not in choices:
            raise ValueError(f"{field}={value!r} must be one of {', '.join(map(str, choices))}")

    def init(params: Any) -> MuonState:
        matrices_of(params, matrix_axes, name)  # refuses vectors
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)
        return MuonState(count=jnp.zeros((), jnp.int32), momentum=zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count = state.count + 1
        gradient_share = 1.0 if form == "sum" else 1.0 - momentum
        sums = jax.tree.map(lambda m, g: momentum * m + gradient_share * g, state.momentum, updates)
        ahead = 1.0
        now = gradient_share
        if form == "ema":
            steps = count.astype(jnp.float32)
            ahead = 1.0 / (1.0 - momentum ** (steps + (1.0 if nesterov else 0.0)))
            now = gradient_share / (1.0 - momentum**steps)
        compute = PrecisionPolicy(compute=dtype).compute_dtype
        orthogonalise = partial(
            newton_schulz, coefficients=coefficients, epsilon=epsilon, dtype=compute
        )

        def direction(m: Array, g: Array, matrix: Matrix) -> Array:
            seen = momentum * ahead * m + now * g if nesterov else ahead * m
            orthogonal = map_matrices(
                orthogonalise,
                jnp.asarray(seen, compute),  # before it travels
                inputs=matrix.inputs,
                outputs=matrix.outputs,
                layout=layout,
            )
            return shape_scale(scale, matrix) * orthogonal.astype(jnp.float32)

        matrices = matrices_of(updates, matrix_axes, name)
        steps = jax.tree.map(direction, sums, updates, matrices)
        return steps, MuonState(count=count, momentum=sums)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: Rate,
    *,
    matrix_axes: Any = None,
    momentum: Number = 0.95,
    nesterov: bool = True,
    form: Form = "sum",
    coefficients: Coefficients = "dion",
    scale: Scale | None = "spectral_norm",
    weight_decay: Number = 0.0,
    epsilon: Number = 1e-8,
    dtype: ComputeDtype = "auto",
    layout: MatrixLayout = "spread",
    other_optimizer: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Return Muon for the matrices of any tree, and AdamW for the rest of it.

    Embeddings and heads are matrices too, unless their pair in `matrix_axes` is None. Experts in
    one array need a pair, (-2, -1), and so do kernels that divide heads, ((-3,), (-2, -1)).

    Args:
        learning_rate: A number, or a function of the optimiser's step.
        matrix_axes: Dimensions that form the matrix: a pair, or a tree of pairs like the
            parameters, None for what is no matrix. All others count matrices, such as experts,
            each of which is orthogonalised by itself. None for a tree in which matrices are arrays
            of two dimensions.
        momentum: Momentum of the gradients.
        nesterov: Whether to look ahead by one step.
        form: Form of the momentum, "sum" or "ema".
        coefficients: Newton-Schulz coefficients, "dion" or "standard".
        scale: Scale of the step by the matrix's shape.
        weight_decay: Decoupled decay, times the learning rate, per step.
        epsilon: Number added to the norm before Newton-Schulz.
        dtype: Dtype of Newton-Schulz; auto: bfloat16 on accelerators, float32 on the CPU.
        layout: Layout of Newton-Schulz on an Explicit mesh.
        other_optimizer: Transformation of vectors, scalars and parameters whose pair is None;
            `adamw(learning_rate, weight_decay=weight_decay)` when None.

    Raises:
        ValueError: A momentum outside [0, 1), a negative weight decay, an unknown name; at `init`
            a parameter without the dimensions of its pair; at an update with weight decay, the
            parameters are missing.
    """
    check_numbers(weight_decay=weight_decay)
    directions = scale_by_muon(
        matrix_axes=stacked_axes(matrix_axes),
        momentum=momentum,
        nesterov=nesterov,
        form=form,
        coefficients=coefficients,
        scale=scale,
        epsilon=epsilon,
        dtype=dtype,
        layout=layout,
    )
    steps = straight_steps(directions, learning_rate, weight_decay=weight_decay)
    return beside(
        standard_promotion(steps, stays_finite=True),
        other_optimizer or adamw(learning_rate, weight_decay=weight_decay),
        matrix_axes,
        "muon",
    )
