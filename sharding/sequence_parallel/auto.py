# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses a form of sequence parallelism from heads, devices, lengths and links.

    one device           none
    heads divide         ulysses, unless it loads the links more than the ring that follows
    otherwise            ring or token_ring, whichever loads the links less; ring where both are
                         alike

counted over one layer's forward and backward pass, on the busiest link in its busiest direction
(`sharding/sequence_parallel/traffic.py`). Rows are laid out in zigzag, but in the order of their
tokens where work is even without it (a window, no causality), where the model needs it, or where
their length divides by the devices and not by twice their number. `all_gather` is never chosen: it
holds S keys where the others hold S/N, and does not overlap with arithmetic; its bytes are reported
beside the others.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, get_args

from pallas_kernels.sequence_layout import SequenceLayout
from pallas_kernels.token_ring_attention.schedule import Form
from sharding.sequence_parallel.all_gather import AllGatherKVConfig
from sharding.sequence_parallel.form import FormChoice, SequenceForm, SequenceParallelism
from sharding.sequence_parallel.none import NoSequenceParallelConfig
from sharding.sequence_parallel.ring import RingConfig
from sharding.sequence_parallel.sizes import AttentionSizes
from sharding.sequence_parallel.token_ring import TokenRingConfig
from sharding.sequence_parallel.traffic import Links, link_bytes
from sharding.sequence_parallel.ulysses import UlyssesConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AutoSequenceParallelConfig(SequenceParallelism):
    """The form that loads the links least: by heads, devices, lengths and links."""

    name: ClassVar[str] = "auto"

    links: Links = "torus"
    """Links between the devices of mesh.seq: to neighbours in a ring (TPU), or a switch (GPU)."""

    def choose(self, sizes: AttentionSizes) -> FormChoice:
        """Return the form for an attention layer, and the reason."""
        return choose(sizes, self.links)


def choose(sizes: AttentionSizes, links: Links = "torus") -> FormChoice:
    """Return the form for an attention layer, and the reason.

    Args:
        sizes: Sizes of the attention layer.
        links: Links between the devices that share a sequence.
    """
    if sizes.ranks == 1:
        return FormChoice(
            config=NoSequenceParallelConfig(),
            reason="none: every device holds whole sequences",
            bytes={},
        )
    forms = candidates(sizes, links)
    loads = {name: link_bytes(form, sizes, links) for name, form in forms.items()}
    rings = [name for name in ("ring", "token_ring") if name in loads]
    ring = min(rings, key=loads.__getitem__)
    loads_in_words = {name: f"{name} {loads[name] / 1e6:.3g} MB" for name in loads}
    heads = f"the {sizes.local_heads} query and {sizes.local_kv_heads} key heads of a device"
    if "ulysses" not in loads:
        choice = ring
        why = f"mesh.seq={sizes.ranks} does not divide {heads}"
    elif loads["ulysses"] <= loads[ring]:
        choice = "ulysses"
        why = f"mesh.seq={sizes.ranks} divides {heads}"
    else:
        choice = ring
        why = f"few devices and {heads} make exchanging them the dearer way"
    order = sorted(loads, key=loads.__getitem__)
    reason = (
        f"{choice}: {why}; per layer and sequence the busiest link ({links}) carries"
        f" {', '.join(loads_in_words[name] for name in order)}"
    )
    return FormChoice(config=forms[choice], reason=reason, bytes=loads)


def candidates(sizes: AttentionSizes, links: Links) -> dict[str, SequenceForm]:
    """Return every form that can run, by name, each in its best shape for the links.

    Args:
        sizes: Sizes of the attention layer.
        links: Links between the devices.
    """
    is_even = not sizes.is_causal or sizes.window is not None
    is_ordered = is_even or sizes.keeps_order or sizes.length % (2 * sizes.ranks) != 0
    layout: SequenceLayout = "contiguous" if is_ordered else "zigzag"
    # Both directions gain nothing through a switch, nor where all needed keys are on one side.
    goes_both_ways = links == "torus" and sizes.local_kv_heads % 2 == 0
    goes_both_ways &= sizes.window is None or not sizes.is_causal
    forms: dict[str, SequenceForm] = {
        "all_gather": AllGatherKVConfig(layout="contiguous" if is_ordered else "zigzag"),
        "ring": RingConfig(layout=layout, directions="both" if goes_both_ways else "one"),
    }
    if sizes.window is None:
        ways = [TokenRingConfig(layout=layout, form=form) for form in get_args(Form)]
        forms["token_ring"] = min(ways, key=lambda form: link_bytes(form, sizes, links))
    if sizes.ranks in sizes.exchangeable:
        forms["ulysses"] = UlyssesConfig()
    return forms
