# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Updates an optimiser state that lies in host memory, part by part (arXiv 2410.21316).

The stacked layers of each scan are updated in a loop over `execution.offload.parts` equal parts,
or the next larger number that divides the layers; a module outside the layers (embedding, norm,
head) is a part of its own. While part i is updated, part i + 1 is brought to the device and part
i - 1 returns to the host, so that two or three parts are on the device instead of the whole:

    fetch 0    of the first module may start when the loss is known, beside the backward pass; of
               another module, when the module before it begins its last part
    fetch i+1  after update i - 1; at the end of a loop the last part is fetched a second time

Parameters and gradients that lie in host memory (`execution.offload.parameters`) arrive and leave
with the state of their part.

New values go to host buffers of their own, and a step that the guard refuses takes the old ones:
nothing is known about the last part when the first one is put away. Host memory therefore holds the
state twice during a step. New parameters on the device are written over the gradients that made
them.

The results are those of an update of the whole, because a `LayerwiseTransformation` treats each
layer by itself. The optimiser is traced once for each module, with zeros for the state of the
others, and only the results of the module are used: the compiler removes the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim.steps import LayerwiseTransformation
from jaxmoe.training.guard import all_finite, select
from jaxmoe.training.host_arrays import is_on_host
from jaxmoe.training.parts.update import (
    CheckedStep,
    Inputs,
    Update,
    UpdatedState,
    one_program,
    state_owners,
    trained_modules,
)
from jaxmoe.training.state import TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step

_HOST = jax.memory.Space.Host
_DEVICE = jax.memory.Space.Device
Updater = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`update` of an optimiser."""


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """Parameters under one name, and the parts in which they are updated."""

    name: str
    """First name of their paths."""
    parts: int | None = None
    """Equal parts of the stacked layers; None for a module outside the layers."""

    def part(self, leaf: Array, number: Int[Array, ""] | int) -> Array:
        """Return one part of an array: some of its layers, or all of an array without layers."""
        if self.parts is None:
            return leaf
        size = leaf.shape[0] // self.parts
        return jax.lax.dynamic_slice_in_dim(leaf, number * size, size, axis=0)

    def written(self, leaf: Array, values: Array, number: Int[Array, ""] | int) -> Array:
        """Return an array with the values of one part."""
        if self.parts is None:
            return values
        return jax.lax.dynamic_update_slice_in_dim(leaf, values, number * values.shape[0], axis=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateOnHost(UpdatedState):
    """State in host memory after an update in parts."""

    new: Any
    old: Any
    is_finite: Bool[Array, ""]

    def kept(self, is_good: Bool[Array, ""]) -> Any:
        """Return the new or the old state; arrays stay in host memory."""
        return select(is_good, self.new, self.old)


def modules_of(model: ModelConfig, params: Any, number: int) -> tuple[Module, ...]:
    """Return the modules of a model's parameters, in the order of their updates.

    Args:
        model: Model with the scans.
        params: Nested dict of parameters.
        number: Least number of parts of each scan; a scan has at most one for each layer.
    """
    lengths = {scan.name: scan.length for scan in model.scans}
    modules = []
    for name in trained_modules(params):
        length = lengths.get(name)
        if length is None:
            modules.append(Module(name))
            continue
        enough = range(min(number, length), length + 1)
        modules.append(Module(name, next(parts for parts in enough if length % parts == 0)))
    return tuple(modules)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInParts(Update):
    """Part after part, of a state in host memory."""

    name: ClassVar[str] = "parts"

    def check(self, step: Step) -> None:
        """Refuse an optimiser that does not promise to treat each layer by itself."""
        check_layerwise(step.execution, step.optimizer)

    def fetches(
        self, model: ModelConfig, params: Any, execution: ExecutionConfig
    ) -> Mapping[str, float]:
        """Return 1 and, for a module of several parts, one part more; see the base class."""
        modules = modules_of(model, params, execution.optimizer_parts)
        numbers = {module.name: module.parts or 1 for module in modules}
        return {name: 1 + 1 / number if number > 1 else 1.0 for name, number in numbers.items()}

    def jit_step(self, step: Step) -> CheckedStep:
        """Return the step as one program; see the base class."""
        return one_program(step)

    def update(
        self, step: Step, state: TrainState, inputs: Inputs
    ) -> tuple[Any, Any, UpdatedState]:
        """Return updates, parameters and state; see the base class."""
        return update_in_parts(
            step.optimizer.update,
            modules_of(step.model, inputs.params, step.execution.optimizer_parts),
            inputs.grads,
            state.opt_state,
            inputs.params,
            after=(inputs.summed.loss, inputs.clipped.norm),
            scale=inputs.clipped.scale,
        )


def check_layerwise(execution: ExecutionConfig, optimizer: optax.GradientTransformation) -> None:
    """Refuse an optimiser that may mix layers.

    Args:
        execution: Where parameters and state lie.
        optimizer: Optimiser of the step.

    Raises:
        ValueError: The optimiser does not promise to treat each layer by itself.
    """
    if isinstance(optimizer, LayerwiseTransformation):
        return
    field = "parts"
    value = str(execution.optimizer_parts)
    alternative = "1"
    if execution.optimizer_memory == "files":
        field = "optimizer"
        value = "files"
        alternative = "host"
    elif execution.optimizer_parts == 1:
        field = "parameters"
        value = "host"
        alternative = "device"
    raise ValueError(
        f"execution.offload.{field}={value} updates the layers of a stack apart, and this"
        " optimizer does not promise to treat each layer by itself: build it with an"
        " Optimizer, wrap it in jaxmoe.optim.steps.LayerwiseTransformation(*optimizer) if"
        f" it does, or set execution.offload.{field} to {alternative}"
    )


def update_in_parts(
    update: Updater,
    modules: tuple[Module, ...],
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    after: tuple[Array, Array],
    scale: Array | float = 1.0,
) -> tuple[Any, Any, StateOnHost]:
    """Return the updates, the new parameters and the new state of an optimiser.

    Args:
        update: `update` of a `LayerwiseTransformation`.
        modules: Modules of the parameters.
        grads: Gradients, laid out as the state.
        opt_state: State in host memory; counters on the device.
        params: Parameters, laid out as the state.
        after: Scalars before which the first fetch and the second one do not start.
        scale: Factor of the gradients that lie in host memory.

    Returns:
        Updates of the parameters, parameters in their memory, and the state.
    """
    state = OwnedState.of(opt_state, params)
    owned = {m.name: OwnedModule(m, grads[m.name], params[m.name], state, scale) for m in modules}
    stand_ins = jax.tree.map(_stand_in, (grads, params))
    updates = {**params}
    written = {**params}
    new = [*state.leaves]
    first = owned[modules[0].name].fetch(0, after[0])
    finite = after[1]
    for number, module in enumerate(modules):
        mine = owned[module.name]
        following = None
        if number + 1 < len(modules):
            following = owned[modules[number + 1].name].fetch(0, finite)
        done, finite = mine.update_parts(update, stand_ins, first, finite)
        updates[module.name], written[module.name] = done.updates, done.params
        for place, leaf in done.state.items():
            new[place] = leaf
        first = following
    joined = StateOnHost(new=state.structure.unflatten(new), old=opt_state, is_finite=finite)
    return updates, written, joined


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedState:
    """Leaves of a state that lies outside device memory."""

    leaves: list[Any]
    owners: list[str | None]
    """First name of the parameter to which each leaf belongs; None for counters."""
    structure: Any

    @classmethod
    def of(cls, opt_state: Any, params: Any) -> OwnedState:
        """Return the leaves of a state.

        Raises:
            ValueError: An array belongs to no parameter.
        """
        leaves, structure = jax.tree.flatten(opt_state)
        return cls(leaves, state_owners(opt_state, params), structure)

    def places(self, owner: str | None) -> list[int]:
        """Return the places of the leaves of a module, or of the counters for None."""
        return [place for place, leaf_owner in enumerate(self.owners) if leaf_owner == owner]

    def counting(self, counters: list[Array]) -> OwnedState:
        """Return the state with other counters."""
        new_counters = iter(counters)
        leaves = [
            next(new_counters) if owner is None else leaf
            for leaf, owner in zip(self.leaves, self.owners, strict=True)
        ]
        return dataclasses.replace(self, leaves=leaves)

    def fill(self, owner: str, values: list[Array]) -> Any:
        """Return a state with values for a module, zeros for others, and all counters."""
        mine = iter(values)

        def fill(leaf: Array, leaf_owner: str | None) -> Array:
            if leaf_owner is None:
                return leaf
            return next(mine) if leaf_owner == owner else _stand_in(leaf)

        filled = [fill(*leaf_owner) for leaf_owner in zip(self.leaves, self.owners, strict=True)]
        return self.structure.unflatten(filled)

    def update_part(
        self,
        owner: str,
        update: Updater,
        stand_ins: tuple[Any, Any],
        leaves: list[Array],
        grads: Any,
        params: Any,
    ) -> tuple[Any, Any, list[Array], list[Array]]:
        """Return updates, parameters, leaves of the state and counters after one part.

        Args:
            owner: Name of the module.
            update: `update` of the optimiser.
            stand_ins: Gradients and parameters for other modules, which are not read.
            leaves: Leaves of the part, in the order of `places`.
            grads: Gradients of the part.
            params: Parameters of the part.
        """
        state = self.fill(owner, leaves)
        updates, new = update(stand_ins[0] | {owner: grads}, state, stand_ins[1] | {owner: params})
        sums = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates[owner])
        new_leaves = self.structure.flatten_up_to(new)
        mine, counters = (
            [new_leaves[place] for place in self.places(leaf_owner)] for leaf_owner in (owner, None)
        )
        return updates[owner], sums, mine, counters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """Results of the update of a module."""

    updates: Any
    params: Any
    state: dict[int, Array]
    """New leaves by their places."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedModule:
    """What belongs to one module."""

    module: Module
    grads: Any
    params: Any
    state: OwnedState
    scale: Array | float

    @property
    def is_away(self) -> bool:
        """Whether parameters and gradients lie in host memory."""
        return any(map(is_on_host, jax.tree.leaves(self.params)))

    def fetch(self, number: Int[Array, ""] | int, after: Array) -> Any:
        """Return the arrays of a part on the device, brought there once a scalar is known."""
        leaves = [self.state.leaves[place] for place in self.state.places(self.module.name)]
        needed = (leaves, (self.grads, self.params) if self.is_away else ())
        needed = jax.tree.map(lambda leaf: self.module.part(leaf, number), needed)
        needed, _ = jax.lax.optimization_barrier((needed, after))
        return jax.device_put(needed, _DEVICE)

    def update_parts(
        self, update: Updater, stand_ins: tuple[Any, Any], first: Any, finite: Array
    ) -> tuple[_Done, Array]:
        """Return the results of all parts, and whether everything was finite so far.

        Args:
            update: `update` of the optimiser.
            stand_ins: Gradients and parameters for other modules, which are not read.
            first: The fetched first part.
            finite: Scalar before which the second part is not fetched.
        """
        parts = self.module.parts or 1
        is_away = self.is_away
        # Gradients are read before they are overwritten; those of another dtype are not.
        first_carry = jax.tree.map(
            lambda g, p: g if g.dtype == p.dtype else p, self.grads, self.params
        )
        finite = jnp.isfinite(finite)

        def body(carry: Any, number: Array) -> tuple[Any, Any]:
            fetched, written, finite = carry
            if parts > 1:
                coming = self.fetch(jnp.minimum(number + 1, parts - 1), finite)
            else:
                coming = fetched
            grads, params = self._values(fetched, written, number)
            steps, sums, new, counters = self.state.update_part(
                self.module.name, update, stand_ins, fetched[0], grads, params
            )
            finite &= all_finite((sums, new))
            if is_away:
                away = jax.device_put((new, sums), _HOST)
                steps = None
            else:
                written = jax.tree.map(
                    lambda leaf, values: self.module.written(leaf, values, number), written, sums
                )
                away = (jax.device_put(new, _HOST), None)
            return (coming, written, finite), (away, steps, counters)

        carry = (first, None if is_away else first_carry, finite)
        if self.module.parts is None:
            (_, written, finite), (away, steps, counters) = body(carry, jnp.int32(0))
        else:
            numbers = jnp.arange(parts, dtype=jnp.int32)
            (_, written, finite), (away, steps, counters) = jax.lax.scan(body, carry, numbers)
            away, steps = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (away, steps))
            counters = [counter[-1] for counter in counters]
        new, sums = away
        places = [*self.state.places(self.module.name), *self.state.places(None)]
        state = dict(zip(places, [*new, *counters], strict=True))
        return _Done(updates=steps, params=sums if is_away else written, state=state), finite

    def _values(self, fetched: Any, written: Any, number: Array) -> tuple[Any, Any]:
        """Return gradients and parameters of a part."""
        if self.is_away:
            grads, params = fetched[1]
            return jax.tree.map(lambda g: g * jnp.asarray(self.scale, g.dtype), grads), params
        part_grads = jax.tree.map(
            lambda w, g: self.module.part(w if w.dtype == g.dtype else g, number),
            written,
            self.grads,
        )
        return part_grads, jax.tree.map(lambda p: self.module.part(p, number), self.params)


def _stand_in(leaf: Array) -> Array:
    """Return zeros on the device for an array that is not read."""
    return jnp.zeros_like(jax.device_put(leaf, _DEVICE))
