# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes that the forms of sequence parallelism send, in closed form, and over which links.

For one attention layer, with N ranks, c tokens, n query and m key heads on each, b bytes a value,
each rank sends, forward and backward (Ulysses twice the same):

    all_gather   2 (N - 1) c m H b           2 (N - 1) c m H b
    ulysses      (N - 1)/N c H b (2 n + 2 m)
    ring         share 2 (N - 1) c m H b     share 2 (N - 1) c m H (b + 4)
    usp          both, the ring of R ranks: (R - 1) for its (N - 1)
    token_ring   share (N - 1) c n (2 H b + 4)    share (N - 1) c n (2 H b + 8 + 4 H)

share: 3/4 for causal zigzag halves, 1/2 for contiguous, 1 otherwise. The time depends on the
busiest link in its busiest direction:

    torus    the ranks form a ring, with a link each way between neighbours; a message to a rank
             that is farther away takes the shorter way, and loads every link of it
    switch   every rank has one link to all others, with equal bandwidth in and out

Optical and other uneven networks are not modelled, nor is what a collective of XLA adds. The
messages themselves are `SequenceForm.messages`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from sharding.sequence_parallel.form import SequenceForm
from sharding.sequence_parallel.sizes import AttentionSizes

Links = Literal["torus", "switch"]


def sent_bytes(form: SequenceForm, sizes: AttentionSizes, *, is_backward: bool) -> float:
    """Return the bytes that a rank sends in one layer, averaged over ranks.

    Args:
        form: Form of sequence parallelism.
        sizes: Sizes of the attention layer.
        is_backward: Backward pass instead of the forward one.
    """
    messages = form.messages(sizes, is_backward=is_backward)
    return sum(message.bytes * len(message.pairs) for message in messages) / sizes.ranks


def repeated_bytes(form: SequenceForm, sizes: AttentionSizes) -> float:
    """Return the bytes that a rank sends again in one layer that is computed again, with the
    results of its attention kept; averaged over ranks.

    Args:
        form: Form of sequence parallelism.
        sizes: Sizes of the attention layer.
    """
    messages = form.repeated_messages(sizes)
    return sum(message.bytes * len(message.pairs) for message in messages) / sizes.ranks


def busiest_link(
    form: SequenceForm, sizes: AttentionSizes, links: Links, *, is_backward: bool
) -> float:
    """Return the bytes over the busiest link in its busiest direction, in one layer.

    Args:
        form: Form of sequence parallelism.
        sizes: Sizes of the attention layer.
        links: Links between the ranks.
        is_backward: Backward pass instead of the forward one.
    """
    n = sizes.ranks
    load = np.zeros((2, n))  # to the next and the previous rank; or out of and into a rank
    for message in form.messages(sizes, is_backward=is_backward):
        for source, target in message.pairs:
            if links == "switch":
                load[0, source] += message.bytes
                load[1, target] += message.bytes
                continue
            ahead = (target - source) % n
            for goes_back in (False, True):
                hops = n - ahead if goes_back else ahead
                if 2 * hops > n:
                    continue
                share = message.bytes / 2 if 2 * hops == n else message.bytes
                first = target if goes_back else source
                load[int(goes_back), (first + np.arange(hops)) % n] += share
    return float(load.max(initial=0.0))


def link_bytes(form: SequenceForm, sizes: AttentionSizes, links: Links) -> float:
    """Return the bytes over the busiest link of a layer, forward and backward.

    Args:
        form: Form of sequence parallelism.
        sizes: Sizes of the attention layer.
        links: Links between the ranks.
    """
    return sum(
        busiest_link(form, sizes, links, is_backward=is_backward) for is_backward in (False, True)
    )
