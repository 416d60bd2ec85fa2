# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines what every adapter has: the table of the adapted model, its targets, and hooks.

    begin(params, layers, key)              parameters before the first step
    prepare(params, layers, key)            parameters as layers read them, with draws in training
    rewrite(params, shared, part)           parameters of one layer as it computes with them
    mix(own, half, placement, train)        what each token has of additions in half a layer
    losses(params, placement)               {name: scalar} that a step adds to the loss
    first_state(params, table, key)         its state before the first step
    after_step(state, grads, step_inputs)   the training state after an accepted update

Each is a no-op by default and leaves the compiled program as it is.
"""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from jaxtyping import Array, Float

from jaxmoe.declarations import Role
from jaxmoe.layers.view import ParameterView
from jaxmoe.parameters import FROZEN, ParameterSpec, ParameterTable
from sharding.constrain import Placement
from sharding.rules import LogicalAxisRules


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetsConfig:
    """Parameters of the model that an adapter is for."""

    roles: tuple[Role, ...] = ("attention_in", "attention_out")
    """Roles of the parameters, as `describe` lists them: attention_in, attention_out, mlp_in,
    mlp_out, shared_in, shared_out, expert_in, expert_out, router, norm, embedding, head."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0; all when empty."""
    pattern: str | None = None
    """Pattern of the paths, with * and ?, beside the roles; all when None."""

    def __post_init__(self):
        if not self.roles:
            raise ValueError("adapter.targets.roles is empty: name a role, such as attention_in")

    def layers_in(self, layer_numbers: tuple[int, ...]) -> list[bool]:
        """Return which layers of a parameter are among the targets; of one outside of layers,
        whether it is.

        Args:
            layer_numbers: Numbers of the layers of the parameter; empty outside of layers.
        """
        return [not self.layers or layer in self.layers for layer in layer_numbers] or [
            not self.layers
        ]

    def check_in_layers(self, name: str) -> None:
        """Refuse roles of parameters outside of layers.

        Args:
            name: Name of the adapter.

        Raises:
            ValueError: There is one.
        """
        if outside := [role for role in ("embedding", "head") if role in self.roles]:
            raise ValueError(
                f"adapter.targets.roles={self.roles}: adapter:{name} shares parameters between"
                f" layers, and {' and '.join(outside)} lie outside of them: leave them out"
            )

    def has(self, row: ParameterSpec) -> bool:
        """Return whether a parameter is among the targets, whatever its layer."""
        is_named = self.pattern is None or fnmatch.fnmatchcase(row.path, self.pattern)
        return is_named and row.declaration.role in self.roles

    def matrices_in(
        self, base: ParameterTable, layers: Layers
    ) -> list[tuple[ParameterSpec, tuple[bool, ...]]]:
        """Return the matrices that are adapted, and for each which of its layers are.

        Args:
            base: Table of the model without an adapter.
            layers: See `Adapter.table`.

        Raises:
            ValueError: The model has none of the targets.
        """
        targets = [row for row in base if self.has(row) and row.declaration.matrix is not None]
        self.check_found(targets, base)
        pairs = [(row, tuple(self.layers_in(layers_of(row, layers)))) for row in targets]
        if not any(any(is_adapted) for _, is_adapted in pairs):
            raise ValueError(
                f"adapter.targets.layers={self.layers} names no layer with"
                f" {' or '.join(self.roles)}: layers are numbered from 0"
            )
        return [pair for pair in pairs if any(pair[1])]

    def check_found(self, rows: Sequence[ParameterSpec], base: ParameterTable) -> None:
        """Refuse targets that the model does not have.

        Args:
            rows: Parameters among the targets.
            base: Parameters of the model.

        Raises:
            ValueError: There are none.
        """
        if not rows:
            roles = sorted({row.declaration.role for row in base})
            pattern = "" if self.pattern is None else f" with a path like {self.pattern!r}"
            raise ValueError(
                f"adapter.targets.roles={self.roles}: the model has no such parameter{pattern}:"
                f" its roles are {', '.join(roles)}"
            )


STATE: Final = "adapter"
"""Key of the state of the adapter in `TrainState.parts`."""

State = TypeVar("State")
"""`jaxmoe.training.state.TrainState`, which a package above this one defines."""


class StepGiven(NamedTuple):
    """What `Adapter.after_step` receives beside state and gradients."""

    before: Any
    """Training state before the step."""
    table: ParameterTable
    """Parameter table of the adapted model."""
    placement: Placement
    """Layout rules."""


class Adapter(ParameterView, abc.ABC):
    """Base class of the configs of adapters; `rewrite` and `mix` are those of `ParameterView`."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Key in the registry."""
    has_view: ClassVar[bool] = False
    """Whether it has `rewrite`, see `jaxmoe/adapters/view.py`."""
    has_after_step: ClassVar[bool] = False
    """Whether it has `first_state` and `after_step`."""
    moves_base: ClassVar[bool] = False
    """Whether `after_step` changes frozen parameters: checkpoints then hold all parameters."""
    can_go_on: ClassVar[bool] = False
    """Whether a new run may begin with the adapter of another: its own parameters, beside those of
    an unchanged model, are all that was trained."""
    late_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that may be changed once it is trained: `task` of rows that have none, `mean_bits`."""
    backward: ClassVar[str | None] = None
    """Member of `jaxmoe.training.estimators.backward` around that of the execution, by name."""

    def note_on(self, steps: int) -> str | None:
        """Return what a user should know about a run of some steps; None for nothing.

        Args:
            steps: Steps of the run.
        """
        del steps
        return None

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """The adapter in words, for the header of a run."""

    @abc.abstractmethod
    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the parameter table of the adapted model.

        Args:
            base: Table of the model without an adapter.
            rules: Logical to mesh axes.
            layers: Numbers of the layers of each stack, by the path of the stack.

        Raises:
            ValueError: The model has none of the targets.
        """

    def prepare(self, params: Any, layers: Layers, key: Array | None = None) -> Any:
        """Return the parameters with those that the layers read (`:down`, `:up`, `:scale`).

        The forward pass calls it first, of training and of inference; gradients go through it.

        Args:
            params: Parameters of the adapted model, nested dicts.
            layers: See `table`.
            key: PRNG key of a training step, the same for all its micro-batches; None otherwise.
        """
        del layers, key
        return params

    def losses(self, params: Any, placement: Placement) -> dict[str, Float[Array, ""]]:
        """Return losses by name; a training step adds them to the cross-entropy and reports them.

        Args:
            params: Parameters of the adapted model, nested dicts of arrays that are cut as the
                mesh has it: `placement.place(array, (None,) * array.ndim)` is whole everywhere.
            placement: Layout rules.
        """
        del params, placement
        return {}

    def first_state(self, params: Any, table: ParameterTable, key: Array) -> Any:
        """Return what the adapter carries from step to step; None for nothing.

        It is `TrainState.parts[STATE]`.

        It is saved, restored and moved between meshes as the rest of the state.

        Args:
            params: Initial parameters; those of the adapted model may be replaced afterwards.
            table: Parameter table of the adapted model.
            key: PRNG key.
        """
        del params, table, key

    def own_state(self, state: Any) -> Any:
        """Return what `first_state` made, after the steps so far.

        Args:
            state: Training state.

        Raises:
            ValueError: The training state was made without the adapter.
        """
        if STATE not in state.parts:
            raise ValueError(
                f"state.parts has no {STATE}, which adapter:{self.name} carries from step to step:"
                " make the state with init_state(model, ..., parts=step.parts)"
            )
        return state.parts[STATE]

    def after_step(self, state: State, grads: Any, step_inputs: StepGiven) -> State:
        """Return the training state after the update of a step, and what the adapter does to it.

        It is called inside the compiled step, outside the gradient, after the optimiser. After an
        update that the guard refuses its result is dropped, so that nothing changes. Leaves that
        are returned as they came cost nothing.

        Args:
            state: `jaxmoe.training.state.TrainState` with the new parameters and moments. `step`
                counts this step; `parts[STATE]` is of `first_state`; `rng` is the constant key of
                the run: fold `step` into it. `params` has all parameters; `opt_state` those
                trained.
            grads: Clipped gradients of the step, summed over its micro-batches, at the parameters
                before it: a tree like the parameters with `optax.MaskedNode` for frozen ones.
            step_inputs: State before the step, parameter table and layout rules; see `losses`.
        """
        del grads, step_inputs
        return state

    def begin(self, params: Any, layers: Layers, key: Array) -> Any:
        """Return the parameters before the first step, with own ones that depend on the base.

        Args:
            params: Parameters with the values of the model that is adapted.
            layers: See `table`.
            key: PRNG key.
        """
        del layers, key
        return params


Layers = tuple[tuple[str, tuple[int, ...]], ...]
"""Pairs (path of a stack of layers, numbers of its layers)."""


def layers_of(row: ParameterSpec, layers: Layers) -> tuple[int, ...]:
    """Return the numbers of the layers of a stacked parameter; empty outside of layers."""
    return next((numbers for path, numbers in layers if row.path.startswith(f"{path}/")), ())


def frozen(row: ParameterSpec) -> ParameterSpec:
    """Return the row of a parameter that is not trained."""
    return dataclasses.replace(row, hyper=dataclasses.replace(row.hyper, group=FROZEN))
