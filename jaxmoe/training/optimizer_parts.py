# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Updates an optimiser state that lies in host memory, part by part (arXiv 2410.21316).

The stacked layers of each scan are cut into `execution.optimizer_parts` parts; a module outside the
layers (embedding, norm, head) is a part of its own. While part i is updated, part i + 1 is brought
to the device and part i - 1 returns to the host, so that two or three parts are on the device
instead of the whole:

    fetch 0    may start when the loss is known, beside the backward pass
    fetch 1    after the gradient norm, beside update 0
    fetch i+1  after update i - 1

New values go to host buffers of their own, and a step that the guard refuses takes the old ones:
nothing is known about the last part when the first one is put away. Host memory therefore holds the
state twice during a step. New parameters are written over the gradients that made them.

Parameters and gradients that lie in host memory (`execution.parameter_memory`) arrive and leave
with the state of their part.

The results are those of an update of the whole, because a `LayerwiseTransformation` treats each
layer by itself. The optimiser is traced once for each part, with zeros for the state of the others,
and only the results of the part are used: the compiler removes the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jaxtyping import Array, Bool

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim.steps import LayerwiseTransformation
from jaxmoe.training.guard import all_finite, select
from jaxmoe.training.host_arrays import is_on_host
from jaxmoe.training.state import UpdatedState

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Parameters that are updated at one time."""

    name: str
    """First name of their paths."""
    start: int | None = None
    """First layer, counted within the scan; None for all of the module."""
    stop: int | None = None
    """Layer after the last one."""

    def of(self, leaf: Array) -> Array:
        """Return the part of an array that is stacked over layers, or the whole of another."""
        if self.start is None:
            return leaf
        return jax.lax.slice_in_dim(leaf, self.start, self.stop, axis=0)

    def written(self, leaf: Array, values: Array) -> Array:
        """Return an array with the values of this part."""
        if self.start is None:
            return values
        return jax.lax.dynamic_update_slice_in_dim(leaf, values, self.start, axis=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateOnHost(UpdatedState):
    """State in host memory after an update in parts."""

    new: Any
    old: Any
    is_finite: Bool[Array, ""]

    def kept(self, is_good: Bool[Array, ""]) -> Any:
        """Return the new or the old state; arrays stay in host memory."""
        return select(is_good, self.new, self.old)


def parts_of(model: ModelConfig, params: Any, number: int) -> tuple[Part, ...]:
    """Return the parts of a model's parameters, in the order of their updates.

    Args:
        model: Model with the scans.
        params: Nested dict of parameters.
        number: Parts of each scan; fewer where a scan has fewer layers.
    """
    lengths, found = {scan.name: scan.length for scan in model.scans}, []
    for name, module in params.items():
        length = lengths.get(name)
        if not jax.tree.leaves(module):  # frozen
            continue
        if length is None:
            found.append(Part(name))
            continue
        count = min(number, length)
        ends = [length * i // count for i in range(count + 1)]
        found += [Part(name, start, stop) for start, stop in itertools.pairwise(ends)]
    return tuple(found)


def check_parts(execution: ExecutionConfig, optimizer: optax.GradientTransformation) -> None:
    """Refuse an optimiser that may mix layers.

    Raises:
        ValueError: The optimiser does not promise to treat each layer by itself.
    """
    if not execution.updates_in_parts or isinstance(optimizer, LayerwiseTransformation):
        return
    field, value = "optimizer_parts", str(execution.optimizer_parts)
    if execution.optimizer_parts == 1:
        field, value = "parameter_memory", "host"
    raise ValueError(
        f"execution.{field}={value} updates the layers of a stack apart, and this"
        " optimizer does not promise to treat each layer by itself: build it with an"
        " OptimizerConfig, wrap it in jaxmoe.optim.steps.LayerwiseTransformation(*optimizer) if"
        f" it does, or set execution.{field} to {'device' if value == 'host' else 1}"
    )


def update_in_parts(
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    parts: tuple[Part, ...],
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
        parts: Parts of the parameters.
        grads: Gradients, laid out as the state.
        opt_state: State in host memory; counters on the device.
        params: Parameters, laid out as the state.
        after: Scalars before which the first and the second fetch do not start.
        scale: Factor of the gradients that lie in host memory.

    Returns:
        Updates of the parameters on the device, None for others; parameters, in their memory; and
        the state.
    """
    waiting = _Waiting.of(opt_state, params)
    modules = {name: _module(grads[name], params[name], scale) for name in params}
    others = {name: one.stand_ins for name, one in modules.items()}
    other_grads, other_params = ({name: two[i] for name, two in others.items()} for i in (0, 1))
    fetched, finite = _fetched(waiting, modules, parts[0], after[0]), [after[1]]
    for number, part in enumerate(parts):
        name, state = part.name, waiting.filled(part, fetched[0])
        given, held = modules[name].values(part, fetched[1])
        if number + 1 < len(parts):
            fetched = _fetched(waiting, modules, parts[number + 1], finite[-1])
        updates, new = update(other_grads | {name: given}, state, other_params | {name: held})
        sums = jax.tree.map(lambda p, u: p + u.astype(p.dtype), held, updates[name])
        finite.append(all_finite((sums, waiting.put_away(part, new))))
        modules[name].write(part, updates[name], sums)
    is_finite = jnp.all(jnp.stack(finite[1:]))
    results = {name: one.results() for name, one in modules.items()}
    return (
        {name: updates for name, (updates, _) in results.items()},
        {name: params for name, (_, params) in results.items()},
        StateOnHost(new=waiting.joined(), old=opt_state, is_finite=is_finite),
    )


class _OnDevice:
    """A module whose parameters and gradients lie on the device."""

    def __init__(self, grads: Any, params: Any):
        self._grads, self._params = grads, params
        # Gradients are read before they are overwritten; those of another dtype are not.
        self._written = jax.tree.map(lambda g, p: g if g.dtype == p.dtype else p, grads, params)
        self._updates: list[Any] = []

    @property
    def stand_ins(self) -> tuple[Any, Any]:
        """Gradients and parameters for the update of another module, which does not read them."""
        return self._grads, self._params

    def waiting(self, part: Part) -> Any:
        """Return what is fetched for a part."""
        del part
        return ()

    def values(self, part: Part, fetched: Any) -> tuple[Any, Any]:
        """Return gradients and parameters of a part."""
        del fetched
        given = jax.tree.map(
            lambda w, g: part.of(w if w.dtype == g.dtype else g), self._written, self._grads
        )
        return given, jax.tree.map(part.of, self._params)

    def write(self, part: Part, updates: Any, params: Any) -> None:
        """Take the results of a part."""
        self._updates.append(updates)
        self._written = jax.tree.map(part.written, self._written, params)

    def results(self) -> tuple[Any, Any]:
        """Return the updates and the new parameters."""
        return _joined(self._updates, self._params), self._written


class _OnHost:
    """A module whose parameters and gradients lie in host memory; see `_OnDevice`."""

    def __init__(self, grads: Any, params: Any, scale: Array | float):
        self._grads, self._params, self._scale = grads, params, scale
        self._pieces: list[Any] = []

    @property
    def stand_ins(self) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, jax.device_put((self._grads, self._params), _DEVICE))

    def waiting(self, part: Part) -> Any:
        return jax.tree.map(part.of, (self._grads, self._params))

    def values(self, part: Part, fetched: Any) -> tuple[Any, Any]:
        del part
        grads, params = fetched
        return jax.tree.map(lambda g: g * jnp.asarray(self._scale, g.dtype), grads), params

    def write(self, part: Part, updates: Any, params: Any) -> None:
        del part, updates
        self._pieces.append(jax.device_put(params, _HOST))

    def results(self) -> tuple[Any, Any]:
        return None, _joined(self._pieces, self._params)


def _module(grads: Any, params: Any, scale: Array | float) -> _OnDevice | _OnHost:
    is_away = any(map(is_on_host, jax.tree.leaves(params)))
    return _OnHost(grads, params, scale) if is_away else _OnDevice(grads, params)


def _fetched(
    waiting: _Waiting, modules: dict[str, _OnDevice | _OnHost], part: Part, after: Array
) -> tuple[list[Array], Any]:
    """Return the arrays of a part on the device, brought there once a scalar is known."""
    needed = waiting.of_part(part), modules[part.name].waiting(part)
    needed, _ = jax.lax.optimization_barrier((needed, after))
    return jax.device_put(needed, _DEVICE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """Leaves of a state in host memory, and the new ones that have returned there."""

    leaves: list[Array]
    owners: list[str | None]
    """First name of the parameter to which each leaf belongs; None for counters."""
    structure: Any
    returned: list[list[Array]]
    """Pieces of each leaf in order, or one counter."""

    @classmethod
    def of(cls, opt_state: Any, params: Any) -> _Waiting:
        """Return the leaves of a state, none of them updated.

        Raises:
            ValueError: An array belongs to no parameter.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(opt_state)
        names = set(traverse_util.flatten_dict(params))
        owners = [_owner(path, leaf, names) for path, leaf in paths]
        return cls([leaf for _, leaf in paths], owners, structure, [[] for _ in paths])

    def of_part(self, part: Part) -> list[Array]:
        """Return the arrays of a part."""
        return [
            part.of(leaf)
            for leaf, owner in zip(self.leaves, self.owners, strict=True)
            if owner == part.name
        ]

    def filled(self, part: Part, fetched: list[Array]) -> Any:
        """Return a state with the fetched arrays, zeros for other parts, and all counters."""
        mine = iter(fetched)

        def fill(leaf: Array, owner: str | None) -> Array:
            if owner is None:
                return leaf
            if owner == part.name:
                return next(mine)
            return jnp.zeros_like(jax.device_put(leaf, _DEVICE))

        filled = [fill(*one) for one in zip(self.leaves, self.owners, strict=True)]
        return self.structure.unflatten(filled)

    def put_away(self, part: Part, new: Any) -> list[Array]:
        """Send the new arrays of a part to host memory, and return those on the device."""
        mine = []
        for leaf, owner, pieces in zip(
            self.structure.flatten_up_to(new), self.owners, self.returned, strict=True
        ):
            if owner is None:
                pieces[:] = [leaf]
            elif owner == part.name:
                mine.append(leaf)
                pieces.append(jax.device_put(leaf, _HOST))
        return mine

    def joined(self) -> Any:
        """Return the new state."""
        return self.structure.unflatten([_concatenated(pieces) for pieces in self.returned])


def _owner(path: Any, leaf: Array, names: set[tuple[str, ...]]) -> str | None:
    """Return the first name of the parameter whose path ends the path of a state's array."""
    keys = tuple(getattr(entry, "key", None) for entry in path)
    for start in range(len(keys)):
        if keys[start:] in names:
            return keys[start]
    if not leaf.ndim:
        return None
    raise ValueError(
        f"execution.optimizer_parts needs to know the parameter of each array of the optimizer's"
        f" state, and {jax.tree_util.keystr(path)} of shape {leaf.shape} belongs to none: set"
        " execution.optimizer_parts to 1"
    )


def _joined(pieces: list[Any], otherwise: Any) -> Any:
    """Return trees of parts joined over layers; the other tree where there are none."""
    return jax.tree.map(lambda *leaves: _concatenated(leaves), *pieces) if pieces else otherwise


def _concatenated(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
