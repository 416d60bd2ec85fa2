# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges: the only functions of a method that communicate between workers.

`mix` takes the payload of this worker and returns the pseudo-gradient of one parameter. It runs
with the axis `About.axis` of workers, under `vmap` or on a mesh, on what a device holds of the
parameter. What it returns is equal on all workers where `is_shared` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmoe.contrib.slow_links.codec import Payload
from pallas_kernels.backend import platform

Decode = Callable[[Payload, Array], Array]


class About(NamedTuple):
    """What all workers know about an exchange."""

    round: Int[Array, ""]
    """Number of the exchange of this fragment, from 0."""
    key: Key[Array, ""]
    """Key of this exchange and parameter, equal on all workers."""
    axis: str
    """Name of the axis of workers."""
    workers: int
    """Number of workers."""
    axes: tuple[str | None, ...]
    """Logical axes of the parameter."""
    split: tuple[tuple[str, ...], ...]
    """Mesh axes that split each dimension of the parameter."""
    is_spread: bool = False
    """Whether each worker has its own devices; under `vmap` a permute needs all workers."""
    alive: Bool[Array, " R"] | None = None
    """Workers whose messages count; None for all. Only methods that exchange gradients set it."""
    mask: Array | None = None
    """Numbers of the parameter that are sent; None for all."""
    factors: Float[Array, " R"] | None = None
    """Factor of each worker's message in a mean over all workers, 1 on average; None for 1."""
    round_key: Key[Array, ""] | None = None
    """Key of this exchange, equal on all workers and for all parameters; None where gradients are
    exchanged."""
    is_beside: bool = False
    """Whether a step that does not need the result follows in the same program."""

    def total(self, x: Array, dimensions: Sequence[int] | None = None) -> Array:
        """Return sums of what the devices of one worker hold, from the sums of this device.

        Args:
            x: Sums over dimensions of the device's part of the parameter.
            dimensions: These dimensions; None for all.
        """
        chosen = self.split if dimensions is None else [self.split[d] for d in dimensions]
        names = tuple(name for entry in chosen for name in entry)
        return jax.lax.psum(x, names) if names else x


class Exchange(NamedTuple):
    """Way of payloads between workers, for one parameter."""

    init: Callable[[Array], Any]
    """Parameter -> state of a worker: arrays of the shape of the parameter, or scalars; zeros."""
    mix: Callable[[Payload, Decode, Array, About, Any], tuple[Array, Any]]
    """(payload, decode, slow parameters, about, state) -> (pseudo-gradient, state)."""
    is_shared: bool = True
    """Whether the pseudo-gradient is equal on all workers."""
    copies: Callable[[int], float] = lambda workers: 2 * (workers - 1) / workers
    """Number of workers -> payloads that a worker sends in a mean exchange."""
    is_mean: bool = False
    """Whether the pseudo-gradient is the mean of the decoded messages."""


def no_state(x: Array) -> tuple[()]:
    """Return the state of an exchange or codec that has none."""
    del x
    return ()


def mean() -> Exchange:
    """Return the exchange whose pseudo-gradient is the mean of the messages, by one all-reduce.

    Payloads must be sums' addends; see `gathered_mean` for others.
    """

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        message = _weigh(decode(payload, slow), setting)
        return jax.lax.psum(message, setting.axis) / setting.workers, state

    return Exchange(init=no_state, mix=mix, is_mean=True)


def _weigh(message: Array, setting: About) -> Array:
    """Return the message of this worker times its factor in a mean."""
    if setting.factors is None:
        return message
    return message * setting.factors[jax.lax.axis_index(setting.axis)].astype(message.dtype)


def permuted_mean() -> Exchange:
    """Return the exchange of `mean`, by permutes where a step runs beside it.

    On a TPU alone: libtpu 0.0.42 keeps an all-reduce synchronous, and runs permutes beside
    products. Each worker sums its part of the messages in the order of the workers, and sends the
    sum to the others: the bytes of an all-reduce, and the same result on all workers.
    """

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        if not (setting.is_beside and setting.is_spread and platform() == "tpu"):
            return mean().mix(payload, decode, slow, setting, state)
        message = _weigh(decode(payload, slow), setting)
        return _sum_by_permutes(message, setting) / setting.workers, state

    return Exchange(init=no_state, mix=mix, is_mean=True)


def _sum_by_permutes(x: Array, setting: About) -> Array:
    """Return the sum of an array over the workers, each part added up by one of them."""
    number = setting.workers
    worker = jax.lax.axis_index(setting.axis)
    if x.shape[0] % number:
        flat = jnp.pad(x.ravel(), (0, -x.size % number))
    else:  # the layout in memory stays as it is
        flat = x
    parts = flat.reshape(number, flat.shape[0] // number, *flat.shape[1:])

    def part_of(place: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(parts, place % number, 0, keepdims=False)

    def around(message: Callable[[int], Array]) -> Array:
        """Return the messages to this worker in the order of their senders, [workers ...]."""
        table = jnp.zeros_like(parts)
        for hop in range(number):
            pairs = [(sender, (sender + hop) % number) for sender in range(number)]
            part = jax.lax.ppermute(message(hop), setting.axis, pairs) if hop else message(0)
            table = jax.lax.dynamic_update_index_in_dim(table, part, (worker - hop) % number, 0)
        return table

    addends = around(lambda hop: part_of(worker + hop))
    total = functools.reduce(jnp.add, list(addends))
    sums = around(lambda hop: total).reshape(flat.shape)
    return sums if flat is x else sums[: x.size].reshape(x.shape)


def gathered_mean(reduce: Literal["workers", "senders"] = "workers") -> Exchange:
    """Return the exchange in which payloads travel encoded, and receivers decode and average.

    Args:
        reduce: Divisor of each sum: all workers, or those whose message is not 0 there.
    """

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        group = Group(gather_around(payload, setting), decode, setting.factors)
        return decoded_mean([group], slow, setting.workers, reduce), state

    return Exchange(
        init=no_state,
        mix=mix,
        copies=lambda workers: workers - 1,
        is_mean=reduce == "workers",
    )


class Group(NamedTuple):
    """Messages of some workers in one encoding."""

    payloads: Payload
    """Payloads, [messages ...]."""
    decode: Decode
    factors: Float[Array, " messages"] | None
    """Factor of each; None for 1."""


def decoded_mean(
    groups: Sequence[Group], slow: Array, workers: int, reduce: Literal["workers", "senders"]
) -> Array:
    """Return the mean of encoded messages, added up one after another in at least float32.

    Args:
        groups: Messages.
        slow: Array of the shape and dtype of the result.
        workers: Number of all workers.
        reduce: Divisor of each sum: all workers, or the factors of those whose message is not 0
            there.
    """
    dtype = jnp.promote_types(slow.dtype, jnp.float32)
    count = jnp.full((), workers, dtype) if reduce == "workers" else jnp.zeros(slow.shape, dtype)
    sums = (jnp.zeros(slow.shape, dtype), count)
    for group in groups:

        def add(sums: Any, received_payload: Any, group: Group = group) -> tuple[Any, None]:
            message = group.decode(received_payload[0], slow).astype(dtype)
            share = (message != 0).astype(dtype)
            if group.factors is not None:
                message = message * received_payload[1].astype(dtype)
                share = share * received_payload[1].astype(dtype)
            count = sums[1] if reduce == "workers" else sums[1] + share
            return (sums[0] + message, count), None

        sums, _ = jax.lax.scan(add, sums, (group.payloads, group.factors))
    total, count = sums
    # A sum of factors may lie below 1.
    is_weighted = any(group.factors is not None for group in groups)
    divisor = jnp.where(count > 0, count, 1) if is_weighted else jnp.maximum(count, 1)
    return (total / divisor).astype(slow.dtype)


def gather_around(payload: Payload, setting: About) -> Payload:
    """Return the payloads of all workers in their order, [workers ...], by permutes in a ring.

    Each worker sends workers - 1 payloads. Permutes are asynchronous on accelerators, and carry
    any dtype as it is.

    Args:
        payload: Payload of this worker.
        setting: Axis of the workers.
    """
    number = setting.workers
    pairs = [(worker, (worker + 1) % number) for worker in range(number)]
    me = jax.lax.axis_index(setting.axis)

    def gather(x: Array) -> Array:
        gathered = jnp.zeros((number, *x.shape), x.dtype)
        for hop in range(number):
            gathered = jax.lax.dynamic_update_index_in_dim(gathered, x, (me - hop) % number, 0)
            if hop < number - 1:
                x = jax.lax.ppermute(x, setting.axis, pairs)
        return gathered

    return jax.tree.map(gather, payload)
