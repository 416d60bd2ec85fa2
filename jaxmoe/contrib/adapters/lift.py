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

from jaxmoe.adapters.base import Adapter, Layers, State, TargetsConfig, Tree, frozen
from jaxmoe.adapters.factors import TRAINED, own_row
from jaxmoe.adapters.sparse import dense, largest_places
from jaxmoe.declarations import Declaration, fold_path
from jaxmoe.field_docs import with_field_docs
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
        given = row.declaration
        assert given.matrix is not None  # targets are matrices
        m, n = given.fan(0), given.fan(1)
        batch = len(given.shape) - sum(map(len, given.matrix))
        shape = (*given.shape[:batch], min((m + n) * self.rank, m * n))
        vector = Declaration(
            shape=shape,
            axes=(*given.axes[:batch], ax.RANK),
            role="adapter",
            matrix=None,
            init="zeros",
        )
        ones, stack = (1,) * len(given.matrix[0]), given.axes[0] if given.is_stacked else ax.RANK
        used = dataclasses.replace(
            vector,
            shape=(len(is_adapted), *ones),
            axes=(stack, *(ax.RANK for _ in ones)),
            init=tuple(map(float, is_adapted)),
        )
        indices = dataclasses.replace(vector, dtype="int32")
        rows = zip(_NAMES, (vector, indices, used), (TRAINED, _FIXED, _FIXED), strict=True)
        return [own_row(f"{row.path}:{name}", own, hyper, rules) for name, own, hyper in rows]

    def rewrite(self, params: Tree, shared: Tree, part: str) -> Tree:
        """Return the parameters of a part with the entries added to its matrices."""
        del shared, part
        flat: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
        for path in _targets(flat):
            entries, places, used = (flat.pop(f"{path}:{name}") for name in _NAMES)
            weight = flat[path]
            whole = PartitionSpec(*(None,) * entries.ndim)
            entries, places = (place_at(own, whole) for own in (entries, places))
            added = dense(entries, places, weight.shape) * used.reshape(())
            flat[path] = weight + place_like(added, weight).astype(weight.dtype)
        return traverse_util.unflatten_dict(flat, sep="/")

    def begun(self, params: Any, layers: Layers, key: Array) -> Any:
        """Return the parameters with the first choice of entries."""
        del layers
        return self._refreshed(params, {}, key)[0]

    def after_step(self, state: State, grads: Any, given: Any) -> State:
        """Return the state with entries chosen anew, every `refresh_every` steps."""
        del grads, given
        now: Any = state
        paths, structure = jax.tree_util.tree_flatten_with_path(now.opt_state)
        names = ["/".join(str(getattr(k, "key", "")) for k in path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        moments: dict[str, dict[int, Array]] = {}
        held: dict[str, Any] = traverse_util.flatten_dict(now.params, sep="/")
        for path in _targets(held):
            entries = held[f"{path}:entries"]
            moments[path] = {
                place: leaf
                for place, (name, leaf) in enumerate(zip(names, leaves, strict=True))
                if name.endswith(f"/{path}:entries") and leaf.shape == entries.shape
            }
        key = jax.random.fold_in(now.rng, now.step)
        params, moments = jax.lax.cond(
            now.step % self.refresh_every == 0,
            lambda given: self._refreshed(given[0], given[1], key),
            lambda given: given,
            (now.params, moments),
        )
        for found in moments.values():
            for place, leaf in found.items():
                leaves[place] = leaf
        return now.replace(params=params, opt_state=structure.unflatten(leaves))

    def _refreshed(self, params: Any, moments: Any, key: Array) -> tuple[Any, Any]:
        """Return parameters and moments, by path and place, for entries chosen anew."""
        flat, moved = dict(traverse_util.flatten_dict(params, sep="/")), {}
        for path in _targets(flat):
            names = (path, f"{path}:entries", f"{path}:places")
            given = (*(flat[name] for name in names), moments.get(path, {}))
            run: Any = self._chosen_anew
            if surroundings() == "explicit":
                specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, given)
                axes = jax.sharding.get_abstract_mesh().axis_names
                run = lie_at(run, axes=axes, specs=specs)
            *new, own = run(*given, flat[f"{path}:used"], fold_path(key, path))
            flat.update(zip(names, new, strict=True))
            moved |= {path: own} if path in moments else {}
        return traverse_util.unflatten_dict(flat, sep="/"), moved

    def _chosen_anew(
        self, weight: Array, entries: Array, places: Array, moments: Any, used: Array, key: Array
    ) -> tuple[Array, Array, Array, Any]:
        """Return weights with the entries added, and zero entries at other places."""
        *batch, k = entries.shape
        number, inputs = math.prod(batch), len(batch) + used.ndim - 1
        m, n = math.prod(weight.shape[len(batch) : inputs]), math.prod(weight.shape[inputs:])
        in_use = jnp.repeat(used.reshape(-1), number // used.size)

        def one(given: Any) -> Any:
            matrix, entries, old, moments, used, key = given
            added = (used * entries).astype(matrix.dtype)
            matrix = matrix.reshape(-1).at[old].add(added).reshape(m, n)
            new = largest_places(matrix, self.approximation_rank, k, key)
            kept = {at: jnp.zeros(m * n, x.dtype).at[old].set(x)[new] for at, x in moments.items()}
            return matrix, new, kept

        def rows(leaf: Array) -> Array:
            return leaf.reshape(number, k)

        given = (weight.reshape(number, m, n), rows(entries), rows(places))
        given = (*given, jax.tree.map(rows, moments), in_use, jax.random.split(key, number))
        matrices, new, kept = jax.lax.map(one, given)
        kept = jax.tree.map(lambda leaf: leaf.reshape(entries.shape), kept)
        new = new.reshape(entries.shape)
        return matrices.reshape(weight.shape), jnp.zeros_like(entries), new, kept


def _targets(params: dict[str, Any]) -> list[str]:
    """Return the paths of the matrices with entries, of parameters by path."""
    return [path.removesuffix(":entries") for path in params if path.endswith(":entries")]
