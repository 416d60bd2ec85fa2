# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages of latents: one vector per token, the key and value of all heads.

    pool [L P G 1 H]    entry of a token: [latent, rotary key]; its value is the first R features

Pages are as in `sharding/sequence_parallel/paged.py`, entries as in
`sharding/sequence_parallel/cached_latent.py`. Every device of the tensor axis holds all entries.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.paged_attention.arguments import Tables, rules_of
from pallas_kernels.paged_attention.xla import attend_gathered
from sharding.constrain import Placement
from sharding.sequence_parallel.cached import NewTokens
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
        self, new: NewTokens, *, latent_dim: int, placement: Placement, rules: AttentionRules
    ) -> tuple[Float[Array, "1 T N Hv"], Seen, PagedLatents]:
        """Write the entries of new tokens into pages and attend to the pages of each sequence.

        Args:
            new: Tokens [1 T] with their entries as keys; -1 is the position of padding.
            latent_dim: R, features of an entry that are its value.
            placement: Layout rules.
            rules: Mask and kernel; the scale must be set.

        Returns:
            The weighted mean of the values, no watched logits, and the pages with the new tokens.

        Raises:
            ValueError: The attention is not causal.
        """
        check_causal(rules)
        paged_rules = rules_of(
            new.q, rules.window, rules.softcap, rules.scale, rules.implementation
        )
        new_axes = new.axes()
        pages = page_axes(self.pool)

        def run(new, pool, tables, *, batch_axes):
            del batch_axes
            pool = write_pages(pool, new.k[0], new.layer, tables.slots)
            operands = (pool, new.layer, Tables(*tables[1:]), new.positions[0], paged_rules)
            out = attend_gathered(
                new.q[0], *operands, lambda entries: (entries, entries[..., :latent_dim])
            )
            return out[None], pool

        region = placement.region(
            run, in_axes=(new_axes, pages, TABLE_AXES), out_axes=(new_axes.q, pages)
        )
        out, pool = region(new, self.pool, self.tables)
        return out, {}, PagedLatents(pool, self.tables)
