# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimiser groups: the base of the optimiser configs, which build one transformation per group.

The parameterisation puts each role into a group; the optimiser config defines what its groups do.

    w = w - rate(step) * (learning_rate_multiplier(role) * direction(group) + decay * w)

    rate   = learning_rate * schedule(step)
    decay  = learning_rate_multiplier * weight_decay * weight_decay_multiplier
           = weight_decay * weight_decay_multiplier / learning_rate      if it is independent

so that an independent decay takes `weight_decay * schedule(step)` of w in a step, whatever the
learning rate. On a sphere the same step is followed by the projection. Parameters of the group
`frozen` have no gradient, state or update.

To add an optimiser: a config that extends `Optimizer` in a file of its own in `jaxmoe/optim`, its
row under `optimizer` in `jaxmoe/catalog/runs.py`, a row of CASES in
`tests/jaxmoe/optim/test_optim.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxmoe.optim.schedules import Schedule
from jaxmoe.optim.steps import check_numbers, divides_safely, standard_promotion
from jaxmoe.parameters import FROZEN, Group, ParameterSpec, ParameterTable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupTraits:
    """Properties of a group that plans, reports and checks read."""

    moments_per_parameter: int
    """Float32 values of optimiser state per parameter."""
    has_whole_matrices: bool = False
    """Whether a step brings each matrix together on one device, which costs traffic and memory."""
    takes_vectors: bool = True
    """Whether a parameter without a matrix may be in the group."""
    takes_zeros: bool = True
    """Whether a parameter that starts at zero may be in the group."""


class RoleGroups(NamedTuple):
    """Groups of the roles whose group a parameterisation leaves to the optimiser."""

    matrices: Group = "adamw"
    """Group of hidden matrices."""
    head: Group = "adamw"
    """Group of the head."""


FROZEN_TRAITS = GroupTraits(moments_per_parameter=0)
"""Traits of frozen parameters, whatever the optimiser."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupMembers:
    """The parameters of one group, and what their rates are made of."""

    table: ParameterTable
    group: Group
    schedule: Schedule
    peak: float | Float[Array, ""]
    """Learning rate of the group before the schedule and the roles' multipliers."""

    def rate(self, count: Any) -> Array:
        """Return the learning rate at a step."""
        return self.peak * self.schedule(jnp.asarray(count))

    def tree(self, function: Callable[[ParameterSpec], Any]) -> dict[str, Any]:
        """Return `function(row)` for the group's parameters, and masked nodes for all others."""
        return self.table.tree(
            lambda row: function(row) if row.hyper.group == self.group else optax.MaskedNode()
        )

    def multipliers(self) -> dict[str, Any]:
        """Return the multiplier of the learning rate of each parameter."""
        return self.tree(lambda row: row.hyper.learning_rate_multiplier)

    def matrix_axes(self) -> dict[str, Any]:
        """Return the dimensions that form the matrix of each parameter."""
        return self.tree(lambda row: row.declaration.matrix)

    def decays(self, weight_decay: float) -> dict[str, Any]:
        """Return the factor on each parameter beside its direction; see the module's formulas."""

        def decay(row: ParameterSpec) -> Any:
            decay_of_group = weight_decay * row.hyper.weight_decay_multiplier
            if decay_of_group == 0.0 or not row.hyper.has_independent_decay:
                return decay_of_group * row.hyper.learning_rate_multiplier
            return decay_of_group / self.peak

        return self.tree(decay)


class Optimizer(abc.ABC):
    """Base class of the optimiser configs."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Key in the registry."""
    groups: ClassVar[Mapping[Group, GroupTraits]]
    """Groups that the optimiser has; a config with one group keeps its state without a name."""
    role_groups: ClassVar[RoleGroups] = RoleGroups()
    """Groups of matrices and head where a parameterisation leaves the choice to the optimiser."""
    parameterizations: ClassVar[tuple[str, ...]] = ()
    """Parameterisations that put matrices into the group of `role_groups`, for messages."""
    stays_finite: ClassVar[bool] = False
    """Whether finite gradients cannot make state or parameters infinite; see
    `jaxmoe.optim.steps.FiniteTransformation`. A subclass that computes more states it anew."""
    learning_rate: float

    def __post_init__(self):
        fields = dataclasses.fields(self)
        check_numbers("optimizer.", **{field.name: getattr(self, field.name) for field in fields})

    @abc.abstractmethod
    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return the steps of one group, which treat each parameter and each layer by itself.

        Args:
            members: Parameters of the group and their rate.
        """

    @classmethod
    def traits(cls, group: Group) -> GroupTraits:
        """Return the traits of a group of this optimiser, or of frozen parameters."""
        return FROZEN_TRAITS if group == FROZEN else cls.groups[group]

    def rate_ratio(self, group: Group) -> float:
        """Return the learning rate of a group over that of the optimiser."""
        del group
        return 1.0

    def peak_rate(self, row: ParameterSpec) -> float:
        """Return the learning rate of one parameter before the schedule; 0 if it is frozen."""
        group = row.hyper.group
        if group == FROZEN:
            return 0.0
        return self.learning_rate * row.hyper.learning_rate_multiplier * self.rate_ratio(group)

    def resolve_dtype(self, compute: Literal["float32", "bfloat16"]) -> Any:
        """Return the config with every dtype "auto" replaced by that of a platform; this one has
        none."""
        del compute
        return self

    def build(
        self,
        table: ParameterTable,
        schedule: Schedule,
        *,
        learning_rate: Float[Array, ""] | None = None,
    ) -> optax.GradientTransformation:
        """Return the optimiser of a model.

        Args:
            table: Multipliers and groups of the parameters.
            schedule: Factor on the learning rate by step.
            learning_rate: Peak learning rate as an argument of the compiled step; None takes the
                config's.

        Raises:
            ValueError: A parameter is in a group that this optimiser does not have or that cannot
                hold it (a vector, or a matrix that starts at zero), or the group for matrices is
                empty.
        """
        check_table(self, table)
        peak = self.learning_rate if learning_rate is None else learning_rate
        present = [group for group in self.groups if any(r.hyper.group == group for r in table)]
        steps: dict[Hashable, optax.GradientTransformation] = {}
        for group in present:
            group_peak = peak * self.rate_ratio(group)
            members = GroupMembers(table=table, group=group, schedule=schedule, peak=group_peak)
            steps[group] = self.transformation(members)
        if not steps:
            built = optax.identity()
        elif len(self.groups) == 1:
            (built,) = steps.values()
        else:
            labels = table.tree(
                lambda row: optax.MaskedNode() if row.is_frozen else row.hyper.group
            )
            built = optax.partition(steps, labels)
        # Those without an epsilon divide by norms.
        is_safe = divides_safely(getattr(self, "epsilon", 1.0))
        built = standard_promotion(built, stays_finite=self.stays_finite and is_safe)
        return train_only(table, built)


def check_table(config: Optimizer, table: ParameterTable) -> None:
    """Refuse a table that an optimiser cannot train.

    Args:
        config: The optimiser.
        table: Groups of the parameters.

    Raises:
        ValueError: See `Optimizer.build`.
    """
    trained = [row for row in table if not row.is_frozen]
    for row in trained:
        group = row.hyper.group
        if group not in config.groups:
            # Standard rates put all roles into the group adamw.
            takes_all = group != "adamw" and "adamw" in config.groups
            names = config.parameterizations or (("standard",) if takes_all else ())
            raise ValueError(
                f"the optimizer {config.name!r} has no group {group}, where the parameterization"
                f" puts {row.path}: choose {_with_group(group)}, or"
                f" {_as_flags(names) or 'another parameterization'}"
            )
    is_needed = config.parameterizations and trained
    if is_needed and all(row.hyper.group != config.role_groups.matrices for row in trained):
        choices = _as_flags(config.parameterizations)
        raise ValueError(
            f"the optimizer {config.name!r} is for parameters of the group"
            f" {config.role_groups.matrices}, and the parameterization puts none there: choose"
            f" {choices}, or optimizer:adamw"
        )
    for row in trained:
        group = row.hyper.group
        traits = config.groups[row.hyper.group]
        if not traits.takes_vectors and row.declaration.matrix is None:
            raise ValueError(
                f"{row.path} is a vector, and the group {group} is for matrices: the"
                f" parameterization must put the role {row.declaration.role!r} into adamw"
            )
        is_zero = row.declaration.init == "zeros" or row.hyper.init_std == 0.0
        if not traits.takes_zeros and is_zero:
            raise ValueError(
                f"{row.path} starts at zero, and {group} keeps the norm that a matrix begins with,"
                f" so it would stay zero: the parameterization must put the role"
                f" {row.declaration.role!r} into adamw, or start it elsewhere"
            )


def _as_flags(parameterizations: tuple[str, ...]) -> str:
    """Return the flags that choose one of them."""
    return " or ".join(f"parameterization:{name}" for name in parameterizations)


def _with_group(group: Group) -> str:
    """Return the optimisers that have a group, as flags."""
    kinds = Optimizer.__subclasses__()
    homes = set[str]()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        # Others may take any group, and are not what its rates are made for.
        own = {"adamw", *kind.role_groups}
        if group in own and group in getattr(kind, "groups", ()):
            homes.add(kind.name)
    return " or ".join(f"optimizer:{name}" for name in sorted(homes)) or "another optimizer"


def train_only(
    table: ParameterTable, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return the transformation with no state and no update for frozen parameters.

    Args:
        table: Groups of the parameters.
        inner: Any optax transformation.

    Returns:
        The same transformation where nothing is frozen. Otherwise one that takes trees with or
        without the frozen parameters and gives zero updates to those that it is given.
    """
    if not table.has_frozen:
        return inner

    def init(params: Any) -> Any:
        return inner.init(table.select_trained(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        trained_params = None if params is None else table.select_trained(params)
        steps, state = inner.update(table.select_trained(updates), state, trained_params, **extra)
        return table.merge(steps, jax.tree.map(jnp.zeros_like, updates)), state

    return type(inner)(init, update)
