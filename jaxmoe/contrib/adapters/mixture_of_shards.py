# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixture of Shards: factors are put together from pools that all layers share (arXiv 2410.00938).

    column k of A = (s_1 | ... | s_l)        l shards of in / l values from the pool of A
    row k of B    = (t_1 | ... | t_l)        l shards of out / l values from the pool of B
    y = x W + alpha / r (x A) B

Matrices of one name and shape share two pools, one for A and one for B, with as many values as
factors of rank `equivalent_rank` of all their layers and experts. The shards of a vector are drawn
from `seed`, for A and B apart (pair dissociation), and are constants of the program. The first
`private` vectors of each layer have shards of their own. One shard and only private vectors are
LoRA. A pool is `shards/<name>_<shape>:down` or `:up`, [n w 1 ...], with as many dimensions behind n
as the inputs or outputs of the matrix.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmoe.adapters.base import Layers, frozen
from jaxmoe.adapters.factors import (
    TRAINED,
    FactorsConfig,
    batch_of,
    by_path,
    factor_rows,
    nest,
    own_row,
)
from jaxmoe.declarations import Declaration
from jaxmoe.field_docs import with_field_docs
from jaxmoe.parameters import ParameterSpec, ParameterTable
from sharding import axes as ax
from sharding.rules import LogicalAxisRules

_SHARDS = "shards"


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixtureOfShardsConfig(FactorsConfig):
    """Low-rank additions from pools of shards that all layers share."""

    name: ClassVar[str] = "mixture_of_shards"

    alpha: float = 32.0
    """The addition is multiplied with alpha over the inner width of the matrix's own factors."""
    equivalent_rank: int = 2
    """Rank of LoRA with as many parameters; rank is that of the additions."""
    shards: int = 4
    """Shards of a vector; they divide the inputs and the outputs of each matrix."""
    private: int = 1
    """Vectors of each layer with shards of their own, at most equivalent_rank."""
    seed: int = 0
    """Seed of the choice of shards."""

    def __post_init__(self):
        FactorsConfig.__post_init__(self)
        rank = self.equivalent_rank
        least = self.private
        if not 1 <= rank <= self.rank:
            raise ValueError(
                f"adapter.equivalent_rank={rank} must be at least 1 and at most"
                f" adapter.rank={self.rank}"
            )
        if not 0 <= least <= rank or least == rank < self.rank:
            raise ValueError(
                f"adapter.private={least} must be at least 0 and below adapter.equivalent_rank="
                f"{rank}, so that shards are left to share; all three ranks may be equal"
            )
        self.targets.check_in_layers(self.name)
        shards = self.shards
        seed = self.seed
        if shards < 1 or seed < 0:
            raise ValueError(f"adapter.{shards=} must be at least 1, adapter.{seed=} 0 or more")

    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the table with frozen rows, scales and pools; see `Adapter.table`."""
        rows = [frozen(row) for row in base]
        groups: dict[str, list[ParameterSpec]] = {}
        for row, is_adapted in self.found(base, layers):
            if not all(is_adapted):
                raise ValueError(
                    f"adapter.targets.layers={self.targets.layers} has some of the layers of"
                    f" {row.path}, which share shards: name all or none of them"
                )
            rows.append(self._scale(row, len(is_adapted), rules))
            shape = row.shape[row.declaration.is_stacked :]
            groups.setdefault(_group(row.path, shape), []).append(row)
        for name, matrices in groups.items():
            rows += self._pools(name, matrices, rules)
        return ParameterTable(tuple(sorted(rows, key=lambda row: row.path)))

    def _scale(self, row: ParameterSpec, num_layers: int, rules: LogicalAxisRules) -> ParameterSpec:
        """Return the row of the scale of a matrix."""
        rank = self._rank_in(row)
        return factor_rows(row, rank, (self.alpha / rank,) * num_layers, rules)[2]

    def prepare(self, params: Any, layers: Layers, key: Array | None = None) -> Any:
        """Return the parameters with factors in place of the pools; see `Adapter.prepare`."""
        del layers, key
        flat = by_path(params)
        groups: dict[str, list[tuple[str, int]]] = {}
        for path in sorted(path.removesuffix(":scale") for path in flat if path.endswith(":scale")):
            stacked = flat[f"{path}:scale"].ndim
            groups.setdefault(_group(path, flat[path].shape[stacked:]), []).append((path, stacked))
        for name, members in groups.items():
            pools = [flat.pop(f"{name}:{side}") for side in ("down", "up")]
            inputs, outputs = (pool.ndim - 1 for pool in pools)
            batches = [flat[path].shape[: -inputs - outputs] for path, _ in members]
            places = sum(map(math.prod, batches))
            at = 0
            equivalent = pools[0].shape[0] // self.shards // places
            for (path, stacked), batch in zip(members, batches, strict=True):
                rank = self._rank(batch[stacked:])
                matrix_shape = flat[path].shape[len(batch) :]
                end = at + math.prod(batch)
                for side, pool in zip(("down", "up"), pools, strict=True):
                    ids = self.ids(f"{name}:{side}", places, rank, equivalent)[at:end]
                    chosen = jnp.asarray(ids.reshape(*batch, rank, self.shards))
                    shape = matrix_shape[inputs:] if side == "up" else matrix_shape[:inputs]
                    vectors = jnp.take(pool, chosen, axis=0).reshape(*batch, rank, *shape)
                    last = len(batch) if side == "up" else -1
                    flat[f"{path}:{side}"] = jnp.moveaxis(vectors, len(batch), last)
                at = end
        return nest(flat)

    def _rank_in(self, row: ParameterSpec) -> int:
        """Return the inner width of the factors of a target, by its shape as in `prepare`."""
        return self._rank(batch_of(row)[row.declaration.is_stacked :])

    def _rank(self, experts: tuple[int, ...]) -> int:
        if not experts:
            return self.rank
        return self.expert_rank or max(1, self.rank // math.prod(experts))

    def _pools(
        self, name: str, rows: list[ParameterSpec], rules: LogicalAxisRules
    ) -> Iterator[ParameterSpec]:
        """Yield the rows of the two pools of a group of matrices."""
        row_declaration = rows[0].declaration
        rank = self._rank_in(rows[0])
        number = sum(math.prod(batch_of(row)) for row in rows) * self.shards
        number *= max(1, self.equivalent_rank * rank // self.rank)
        for side, end in enumerate(("down", "up")):
            width = (row_declaration.fan(0), row_declaration.fan(1))[side]
            if width % self.shards:
                raise ValueError(
                    f"adapter.shards={self.shards} must divide the {('inputs', 'outputs')[side]} of"
                    f" {rows[0].path}, {width}"
                )
            assert row_declaration.matrix is not None  # targets are matrices
            shape = (number, width // self.shards, *(1,) * (len(row_declaration.matrix[side]) - 1))
            declaration = Declaration(
                shape=shape,
                axes=(ax.RANK,) * len(shape),
                role="adapter",
                matrix=None,
                init="zeros" if side else "normal",
            )
            hyper = dataclasses.replace(TRAINED, init_std=1.0 / math.sqrt(width), fan_in_power=0.0)
            yield own_row(f"{name}:{end}", declaration, hyper, rules)

    def ids(self, path: str, places: int, rank: int, equivalent: int) -> Int[np.ndarray, "m r l"]:
        """Return the shards of each vector of each layer and expert.

        Args:
            path: Path of the pool.
            places: Layers and experts that share it (m).
            rank: Vectors of each (r).
            equivalent: Vectors of each that the pool has values for.
        """
        private = min(self.private * rank // self.rank, equivalent - (rank > equivalent))
        private_ids = np.arange(places * private * self.shards).reshape(
            places, private, self.shards
        )
        rng = np.random.default_rng([self.seed, zlib.crc32(path.encode())])
        num_left = places * (equivalent - private) * self.shards
        num_drawn = (rank - private) * self.shards
        draw = functools.partial(rng.choice, num_left, num_drawn, replace=num_left < num_drawn)
        drawn = [private_ids.size + draw() for _ in range(places)] if num_drawn else []
        shared_ids = np.array(drawn, np.int64).reshape(places, rank - private, self.shards)
        return np.concatenate([private_ids, shared_ids], axis=1).astype(np.int32)


def _group(path: str, shape: tuple[int, ...]) -> str:
    """Return the name of the pools of matrices with a name and a shape of one layer."""
    return f"{_SHARDS}/{path.rpartition('/')[2]}_{'x'.join(map(str, shape))}"
