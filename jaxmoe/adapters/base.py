# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines what every adapter has: the table of the adapted model, its targets, and hooks.

    begun(params, layers, key)         parameters before the first step
    drawn(params, layers, key)         parameters of one training step, random ones drawn
    used(params)                       parameters as the layers read them
    rewrite(params, shared, part)      parameters of one layer as it reads them
    losses(params, placement)          {name: scalar} that a step adds to the loss
    first_state(params, table, key)    its state before the first step
    after_step(state, grads, given)    the training state after an accepted update
    within(params, layers, budget)     parameters of a smaller model, for `convert --fold`

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
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.view import check_view
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


class Adapter(abc.ABC):
    """Base class of the configs of adapters."""

    __slots__ = ()

    name: ClassVar[str]
    """Key in the registry."""
    has_factors: ClassVar[bool] = False
    """Whether it adds products of two factors to matrices, all with ranks and scales as
    `LoraConfig` has them."""
    has_view: ClassVar[bool] = False
    """Whether it has `rewrite`, see `jaxmoe/adapters/view.py`."""
    has_mixing: ClassVar[bool] = False
    """Whether it makes several additions to a matrix and mixes them for each token; it is then a
    `jaxmoe.layers.mixing.Mixing`."""
    has_after_step: ClassVar[bool] = False
    """Whether it has `first_state` and `after_step`."""
    makes_matrices: ClassVar[bool] = False
    """Whether the table lacks matrices, which `rewrite` makes."""
    moves_base: ClassVar[bool] = False
    """Whether `after_step` changes frozen parameters: checkpoints then hold all parameters."""

    @property
    def passes(self) -> int:
        """Number of passes over each row of a step, whose draws of additions are compared: see
        `jaxmoe.training.repeated`."""
        return 1

    @property
    def can_go_on(self) -> bool:
        """Whether a new run may begin with the adapter of another: its own parameters, beside those
        of an unchanged model, are all that was trained."""
        trains_arrays = self.has_factors or self.has_mixing
        return trains_arrays and not (self.has_after_step or self.moves_base)

    def at_task(self, task: int) -> Any:
        """Return the adapter with a task for rows that have none.

        Args:
            task: Number of the task.

        Raises:
            ValueError: It has no tasks, or not this one.
        """
        raise ValueError(f"task={task}: adapter:{self.name} has no tasks: leave it out")

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

    def check_execution(self, execution: ExecutionConfig) -> None:
        """Refuse an execution that the adapter cannot be trained with, before anything is traced.

        Args:
            execution: Execution with every size of the mesh filled in.

        Raises:
            ValueError: The state or the parameters wait in other memory, and `after_step` needs
                them; or the layout gathers parameters before a view could rewrite them, or
                keeps them in few bits.
        """
        if self.has_view:
            check_view(execution)
            execution.precision.check_trains()
        for field in ("optimizer_memory", "parameter_memory"):
            where = getattr(execution, field)
            if self.has_after_step and where != "device":
                raise ValueError(
                    f"execution.{field}={where}: adapter:{self.name} changes the state after each"
                    f" step, which must be on the device: set execution.{field} to device"
                )

    def used(self, params: Any) -> Any:
        """Return the parameters with those that the layers read (`:down`, `:up`, `:scale`).

        The forward pass calls it first, of training and of inference; gradients go through it.

        Args:
            params: Parameters of the adapted model, nested dicts.
        """
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

    def after_step(self, state: State, grads: Any, given: StepGiven) -> State:
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
            given: State before the step, parameter table and layout rules; see `losses` for these.
        """
        del grads, given
        return state

    def rewrite(self, params: Tree, shared: Tree, part: str) -> Tree:
        """Return the parameters that one layer, or one module outside the layers, computes with.

        They may have factors (`:down`, `:up`, `:scale`), with which the products multiply. What is
        not rewritten is returned as it came, so that a second call changes nothing.

        Args:
            params: Parameters of the part, nested dicts, with the adapter's own beside the matrices
                (`q:name` beside `q`).
            shared: Own parameters at the root of the model's, by name.
            part: Path of the stack of the layer, or name of the module.
        """
        del shared, part
        return params

    def drawn(self, params: Any, layers: Layers, key: Array) -> Any:
        """Return the parameters of one training step, with those drawn that are random.

        Args:
            params: Parameters of the adapted model, nested dicts.
            layers: See `table`.
            key: PRNG key of the step, the same for all its micro-batches.
        """
        del layers, key
        return params

    def begun(self, params: Any, layers: Layers, key: Array) -> Any:
        """Return the parameters before the first step, with own ones that depend on the base.

        Args:
            params: Parameters with the values of the model that is adapted.
            layers: See `table`.
            key: PRNG key.
        """
        del layers, key
        return params

    def within(self, params: Any, layers: Layers, budget: float) -> Any:
        """Return the parameters of the member of a family of models that a budget has room for.

        Args:
            params: Parameters of the adapted model, nested dicts.
            layers: See `table`.
            budget: Mean of the bits of the adapted layers.

        Raises:
            ValueError: The adapter trains no family of models, or none is so small.
        """
        del params, layers
        raise ValueError(
            f"fold_bits={budget:g} chooses the bits of layers, which adapter:{self.name} does not"
            " train for: leave it out"
        )


Tree = dict[str, Any]
Layers = tuple[tuple[str, tuple[int, ...]], ...]
"""Pairs (path of a stack of layers, numbers of its layers)."""


def layers_of(row: ParameterSpec, layers: Layers) -> tuple[int, ...]:
    """Return the numbers of the layers of a stacked parameter; empty outside of layers."""
    return next((numbers for path, numbers in layers if row.path.startswith(f"{path}/")), ())


def frozen(row: ParameterSpec) -> ParameterSpec:
    """Return the row of a parameter that is not trained."""
    return dataclasses.replace(row, hyper=dataclasses.replace(row.hyper, group=FROZEN))
