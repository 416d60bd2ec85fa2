# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""LIFT: trains the few entries of each matrix that its low-rank approximation is largest at.

    k = min((m + n) r, m n) entries of W [m n], the largest of |approximation of W of rank q|

Every 100 steps the entries are chosen anew: what has been trained is added to W, and Adam's moments
stay where an entry is chosen again and start at 0 elsewhere. So W moves, and checkpoints hold it.

    q:entries [L *G k]      what is added to W, trained
    q:places [L *G k] i32   index of each entry in its matrix, rows first
    q:used [L 1...]         1 in adapted layers, else 0; a dimension of size 1 for each input

Source: LIFT, arXiv 2506.00772.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxmoe.adapters.base import Adapter, Layers, State, TargetsConfig, frozen
from jaxmoe.adapters.factors import TRAINED, own_row
from jaxmoe.contrib.adapters.sparse import dense, largest_places
from jaxmoe.declarations import Declaration, fold_path
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.view import Tree
from jaxmoe.parameters import FROZEN, ParameterSpec, ParameterTable
from sharding import axes as ax
from sharding.constrain import lie_at, place_at, place_like, surroundings
from sharding.rules import LogicalAxisRules

_FIXED = dataclasses.replace(TRAINED, group=FROZEN)
_NAMES = ("entries", "places", "used")


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LiftConfig(Adapter):
    """Train the largest entries of each target's low-rank approximation; all else is frozen."""

    name: ClassVar[str] = "lift"
    has_view: ClassVar[bool] = True
    has_after_step: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True

    rank: int = 16
    """Entries that are trained, as the rank of factors of as many values."""
    approximation_rank: int = 128
    """Rank of the approximation in which the largest entries are looked for."""
    refresh_every: int = 100
    """Steps between two choices of the entries."""
    targets: TargetsConfig = TargetsConfig()
    """Matrices that are adapted."""

    def __post_init__(self):
        for field in ("rank", "approximation_rank", "refresh_every"):
            if (value := getattr(self, field)) < 1:
                raise ValueError(f"adapter.{field}={value} must be at least 1")

    @property
    def words(self) -> str:
        """The adapter in words, for the header of a run."""
        return f"lift rank {self.rank}, on {' '.join(self.targets.roles)}"

    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the table with frozen rows, and the entries; see `Adapter.table`."""
        rows = [frozen(row) for row in base]
        for row, is_adapted in self.targets.matrices_in(base, layers):
            rows += self._rows_of(row, is_adapted, rules)
        return ParameterTable(tuple(sorted(rows, key=lambda row: row.path)))

    def _rows_of(
        self, row: ParameterSpec, is_adapted: tuple[bool, ...], rules: LogicalAxisRules
    ) -> list[ParameterSpec]:
        declaration = row.declaration
        assert declaration.matrix is not None  # targets are matrices
        m = declaration.fan(0)
        n = declaration.fan(1)
        batch = len(declaration.shape) - sum(map(len, declaration.matrix))
        shape = (*declaration.shape[:batch], min((m + n) * self.rank, m * n))
        vector = Declaration(
            shape=shape,
            axes=(*declaration.axes[:batch], ax.RANK),
            role="adapter",
            matrix=None,
            init="zeros",
        )
        ones = (1,) * len(declaration.matrix[0])
        stack = declaration.axes[0] if declaration.is_stacked else ax.RANK
        selection = dataclasses.replace(
            vector,
            shape=(len(is_adapted), *ones),
            axes=(stack, *(ax.RANK for _ in ones)),
            init=tuple(map(float, is_adapted)),
        )
        indices = dataclasses.replace(vector, dtype="int32")
        rows = zip(_NAMES, (vector, indices, selection), (TRAINED, _FIXED, _FIXED), strict=True)
        return [
            own_row(f"{row.path}:{name}", row_declaration, hyper, rules)
            for name, row_declaration, hyper in rows
        ]

    def rewrite(self, params: Tree, shared: Tree, part: str) -> Tree:
        """Return the parameters of a part with the entries added to its matrices."""
        del shared, part
        flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
        for path in _targets(flat):
            entries, places, is_used = (flat.pop(f"{path}:{name}") for name in _NAMES)
            weight = flat[path]
            replicated = PartitionSpec(*(None,) * entries.ndim)
            entries, places = (place_at(array, replicated) for array in (entries, places))
            added = dense(entries, places, weight.shape) * is_used.reshape(())
            flat[path] = weight + place_like(added, weight).astype(weight.dtype)
        return traverse_util.unflatten_dict(flat, sep="/")

    def begin(self, params: Any, layers: Layers, key: Array) -> Any:
        """Return the parameters with the first choice of entries."""
        del layers
        return self._refresh(params, {}, key)[0]

    def after_step(self, state: State, grads: Any, step_inputs: Any) -> State:
        """Return the state with entries chosen anew, every `refresh_every` steps."""
        del grads, step_inputs
        now: Any = state
        paths, structure = jax.tree_util.tree_flatten_with_path(now.opt_state)
        names = ["/".join(str(getattr(k, "key", "")) for k in path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        moments: dict[str, dict[int, Array]] = {}
        flat: dict[str, Any] = traverse_util.flatten_dict(now.params, sep="/")
        for path in _targets(flat):
            entries = flat[f"{path}:entries"]
            moments[path] = {
                place: leaf
                for place, (name, leaf) in enumerate(zip(names, leaves, strict=True))
                if name.endswith(f"/{path}:entries") and leaf.shape == entries.shape
            }
        key = jax.random.fold_in(now.rng, now.step)
        params, moments = jax.lax.cond(
            now.step % self.refresh_every == 0,
            lambda given: self._refresh(given[0], given[1], key),
            lambda given: given,
            (now.params, moments),
        )
        for moment in moments.values():
            for place, leaf in moment.items():
                leaves[place] = leaf
        return now.replace(params=params, opt_state=structure.unflatten(leaves))

    def _refresh(self, params: Any, moments: Any, key: Array) -> tuple[Any, Any]:
        """Return parameters and moments, by path and place, for entries chosen anew."""
        flat = dict(traverse_util.flatten_dict(params, sep="/"))
        moved = {}
        for path in _targets(flat):
            names = (path, f"{path}:entries", f"{path}:places")
            arguments = (*(flat[name] for name in names), moments.get(path, {}))
            run: Any = self._chosen_anew
            if surroundings() == "explicit":
                specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, arguments)
                axes = jax.sharding.get_abstract_mesh().axis_names
                run = lie_at(run, axes=axes, specs=specs)
            *new, path_moments = run(*arguments, flat[f"{path}:used"], fold_path(key, path))
            flat.update(zip(names, new, strict=True))
            moved |= {path: path_moments} if path in moments else {}
        return traverse_util.unflatten_dict(flat, sep="/"), moved

    def _chosen_anew(
        self, weight: Array, entries: Array, places: Array, moments: Any, is_used: Array, key: Array
    ) -> tuple[Array, Array, Array, Any]:
        """Return weights with the entries added, and zero entries at other places."""
        *batch, k = entries.shape
        number = math.prod(batch)
        inputs = len(batch) + is_used.ndim - 1
        m = math.prod(weight.shape[len(batch) : inputs])
        n = math.prod(weight.shape[inputs:])
        in_use = jnp.repeat(is_used.reshape(-1), number // is_used.size)

        def one(arguments: Any) -> Any:
            matrix, entries, old, moments, is_used, key = arguments
            added = (is_used * entries).astype(matrix.dtype)
            matrix = matrix.reshape(-1).at[old].add(added).reshape(m, n)
            new = largest_places(matrix, self.approximation_rank, k, key)
            carried = {
                at: jnp.zeros(m * n, x.dtype).at[old].set(x)[new] for at, x in moments.items()
            }
            return matrix, new, carried

        def rows(leaf: Array) -> Array:
            return leaf.reshape(number, k)

        arguments = (weight.reshape(number, m, n), rows(entries), rows(places))
        arguments = (*arguments, jax.tree.map(rows, moments), in_use, jax.random.split(key, number))
        matrices, new, carried = jax.lax.map(one, arguments)
        carried = jax.tree.map(lambda leaf: leaf.reshape(entries.shape), carried)
        new = new.reshape(entries.shape)
        return matrices.reshape(weight.shape), jnp.zeros_like(entries), new, carried


def _targets(params: dict[str, Any]) -> list[str]:
    """Return the paths of the matrices with entries, of parameters by path."""
    return [path.removesuffix(":entries") for path in params if path.endswith(":entries")]
