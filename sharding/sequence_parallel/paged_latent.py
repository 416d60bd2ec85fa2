# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of latents: one vector per token, the key and value of all heads.

    pool [L P G 1 H]    entry of a token: [latent, rotary key]; its value is the first R features

Pages are as in `sharding/sequence_parallel/paged.py`, entries as in
`sharding/sequence_parallel/cached_latent.py`. Every device of the tensor axis holds all entries.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.arguments import Tables, rules_of
from pallas_kernels.paged_attention.xla import attend_gathered
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.local_attention import AttentionRules, Seen
from sharding.sequence_parallel.paged import (
    TABLE_AXES,
    PageTables,
    check_causal,
    page_axes,
    write_pages,
)


class PagedLatents(NamedTuple):
    """Pages of a stack of layers, and the places of the tokens of a step."""

    pool: Float[Array, "L P G 1 H"]
    tables: PageTables

    def attend(
        self,
        q: Float[Array, "1 T N H"],
        new: Float[Array, "1 T H"],
        layer: Int[Array, ""],
        *,
        latent_dim: int,
        placement: Placement,
        positions: Int[Array, "1 T"],
        rules: AttentionRules,
    ) -> tuple[Float[Array, "1 T N Hv"], Seen, PagedLatents]:
        """Write the entries of new tokens into pages and attend to the pages of each sequence.

        Args:
            q: Queries of the new tokens, as wide as an entry.
            new: Entries of the new tokens.
            layer: Layer of the pool that is written and read.
            latent_dim: R, features of an entry that are its value.
            placement: Layout rules.
            positions: Positions of the new tokens; -1 for padding.
            rules: Mask and kernel; the scale must be set.

        Returns:
            The weighted mean of the values, no watched logits, and the pages with the new tokens.

        Raises:
            ValueError: The attention is not causal.
        """
        check_causal(rules)
        paged_rules = rules_of(q, rules.window, rules.softcap, rules.scale, rules.implementation)
        heads = (ax.ACT_BATCH, None, ax.ACT_HEADS, None)
        pages = page_axes(self.pool)

        def run(q, new, pool, layer, tables, positions, *, batch_axes):
            del batch_axes
            pool = write_pages(pool, new[0], layer, tables.slots)
            operands = (pool, layer, Tables(*tables[1:]), positions[0], paged_rules)
            out = attend_gathered(
                q[0], *operands, lambda entries: (entries, entries[..., :latent_dim])
            )
            return out[None], pool

        region = placement.region(
            run,
            in_axes=(
                heads,
                (ax.ACT_BATCH, None, None, None),
                pages,
                (),
                TABLE_AXES,
                (ax.ACT_BATCH, None),
            ),
            out_axes=(heads, pages),
        )
        out, pool = region(q, new[:, :, None], self.pool, layer, self.tables, positions)
        return out, {}, PagedLatents(pool, self.tables)
