# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Encodings that differ between workers, for links of different speed.

A program is the same on all workers, so each encodes its message both ways and sends only its own
encoding: the permutes of an encoding have only the workers that use it as sources. Messages go
straight to each receiver, and not around a ring, where slow workers would pass on those of fast
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from jaxmoe.contrib.slow_links.codec import Codec, Payload
from jaxmoe.contrib.slow_links.exchange import (
    About,
    Decode,
    Exchange,
    Group,
    decoded_mean,
    no_state,
)
from jaxmoe.contrib.slow_links.fragments import Leaf


class SlowWorkers(NamedTuple):
    """Workers whose messages are encoded otherwise."""

    workers: tuple[int, ...]
    """Their numbers."""
    codec: Callable[[Leaf], Codec | None]
    """Encoding of each parameter; None for that of all workers. It has the same state."""

    def is_slow(self, worker: Int[Array, ""]) -> Bool[Array, ""]:
        """Return whether a worker is one of these."""
        return jnp.any(worker == jnp.asarray(self.workers, jnp.int32))


def either(fast: Codec, slow: Codec, is_slow: Bool[Array, ""]) -> Codec:
    """Return the codec that encodes both ways, and goes on as one of them.

    Args:
        fast: Codec of fast workers.
        slow: Codec of slow workers.
        is_slow: Whether this worker is slow.
    """

    def encode(x: Array, state: Any, key: Key[Array, ""]) -> tuple[Payload, Any]:
        (wide, after), (narrow, otherwise) = (c.encode(x, state, key) for c in (fast, slow))
        chosen = jax.tree.map(lambda s, f: jnp.where(is_slow, s, f), otherwise, after)
        return (wide, narrow), chosen

    def decode(payload: Payload, like: Array) -> Array:
        return jnp.where(is_slow, slow.decode(payload[1], like), fast.decode(payload[0], like))

    return Codec(
        init=fast.init,
        encode=encode,
        decode=decode,
        bits=lambda shape: fast.bits(shape) + slow.bits(shape),
    )


def selective_mean(
    fast: Codec, slow: Codec, numbers: Sequence[int], reduce: Literal["workers", "senders"]
) -> Exchange:
    """Return the exchange of payloads of `either`, which receivers decode and average.

    Args:
        fast: Codec of fast workers.
        slow: Codec of slow workers.
        numbers: Numbers of slow workers.
        reduce: Divisor of each sum: all workers, or those whose message is not 0 there.
    """

    def mix(payload: Payload, decode: Decode, like: Array, setting: About, state: Any) -> Any:
        del decode
        fast_numbers = [worker for worker in range(setting.workers) if worker not in numbers]
        groups = []
        for part, codec, senders in zip(
            payload, (fast, slow), (fast_numbers, sorted(numbers)), strict=True
        ):
            places = jnp.asarray(senders, jnp.int32)
            factors = None if setting.factors is None else setting.factors[places]
            groups.append(Group(gather_from(part, senders, setting), codec.decode, factors))
        return decoded_mean(groups, like, setting.workers, reduce), state

    return Exchange(init=no_state, mix=mix, copies=lambda workers: workers - 1)


def gather_from(payload: Payload, senders: Sequence[int], setting: About) -> Payload:
    """Return the payloads of some workers in their order, [senders ...], on all workers.

    Each of them sends its payload workers - 1 times, straight to the receivers; others send
    nothing, if each worker has its own devices.

    Args:
        payload: Payload of this worker.
        senders: Numbers of the workers that send.
        setting: Axis of the workers.
    """
    number = setting.workers
    me = jax.lax.axis_index(setting.axis)
    places = jnp.asarray(senders, jnp.int32)

    def gather(x: Array) -> Array:
        gathered = jnp.zeros((number, *x.shape), x.dtype)
        for hop in range(number):
            sources = senders if setting.is_spread else range(number)
            pairs = [(source, (source + hop) % number) for source in sources]
            got = jax.lax.ppermute(x, setting.axis, pairs) if hop else x
            gathered = jax.lax.dynamic_update_index_in_dim(gathered, got, (me - hop) % number, 0)
        return gathered[places]

    return jax.tree.map(gather, payload)
