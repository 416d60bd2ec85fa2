# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws experts of a layer to those most like them (arXiv 2602.11543)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.contrib.slow_links.fragments import Leaf
from sharding import axes as ax
from sharding.constrain import lie_at, surroundings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertMerging:
    """When and how far experts are merged."""

    leaves: Mapping[str, Leaf]
    """{path: what is known of a parameter of experts}."""
    rate: float
    """Distance of the first merging."""
    every: int
    """Steps between two mergings."""
    steps: int
    """Steps until the distance is 0."""
    nearest: int
    """Experts to which an expert is drawn."""

    def apply(self, params: dict[str, Array], step: Int[Array, ""]) -> dict[str, Array]:
        """Return parameters with experts merged, if the step is one of merging.

        Args:
            params: {path: parameter}; others than those of experts stay.
            step: Step after which experts may be merged.
        """
        experts = {path: x for path, x in params.items() if path in self.leaves}
        rate = self.rate * jnp.maximum(0.0, 1.0 - step.astype(jnp.float32) / self.steps)

        def merge(experts: dict[str, Array]) -> dict[str, Array]:
            return self._merge(experts, rate)

        run = merge
        if surroundings() == "explicit":
            specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, experts)
            names = jax.sharding.get_abstract_mesh().axis_names

            def run(experts: dict[str, Array]) -> dict[str, Array]:
                # The rate is an argument: a function under other axes may not close over arrays.
                inner = lie_at(self._merge, axes=names, specs=specs)
                return inner(experts, rate)

        is_due = (step % self.every == 0) & (rate > 0.0)
        return params | jax.lax.cond(is_due, run, lambda experts: experts, experts)

    def _merge(self, experts: dict[str, Array], rate: Float[Array, ""]) -> dict[str, Array]:
        """Return the parameters of experts after a merging, module by module."""
        modules: dict[str, list[str]] = {}
        for path in experts:
            modules.setdefault(re.split(r"[:/][^:/]*$", path)[0], []).append(path)
        merged = {}
        for paths in modules.values():
            first = next((p for p in paths if self.leaves[p].role == "expert_in"), paths[0])
            weights = near(_rows(experts[first], self.leaves[first]), self.nearest)
            for path in paths:
                rows = _rows(experts[path], self.leaves[path])
                middle = jnp.einsum(
                    "lef,lfn->len", weights, rows, preferred_element_type=jnp.float32
                )
                moved = (rows + rate * (middle - rows)).astype(rows.dtype)
                merged[path] = moved.reshape(experts[path].shape)
        return merged


def near(rows: Float[Array, "layers experts n"], nearest: int) -> Float[Array, "layers e f"]:
    """Return weights of the mean of the experts nearest to each expert of a layer.

    Args:
        rows: Numbers of each expert.
        nearest: Number of experts; all others if there are fewer.
    """
    rows = rows.astype(jnp.float32)
    norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    unit = rows / jnp.maximum(norms, 1e-30)
    cosines = jnp.einsum("len,lfn->lef", unit, unit, preferred_element_type=jnp.float32)
    experts = rows.shape[1]
    cosines = jnp.where(jnp.eye(experts, dtype=bool)[None], -jnp.inf, cosines)
    count = min(nearest, experts - 1)
    _, chosen = jax.lax.top_k(cosines, count)
    return jnp.sum(jax.nn.one_hot(chosen, experts, dtype=jnp.float32), axis=2) / max(count, 1)


def _rows(x: Array, leaf: Leaf) -> Float[Array, "layers experts n"]:
    experts = leaf.axes.index(ax.EXPERTS)
    layers = 1 if experts == 0 else x.shape[0]
    return x.reshape(layers, x.shape[experts], -1)
