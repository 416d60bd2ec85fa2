# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The law of methods that exchange gradients in every step.

    message_i = carry * agreed + (1 - carry) * gradient_i,  encoded and exchanged: one gradient

Workers hold the same parameters and optimiser. The gradient of worker i counts as its tokens do, so
that the mean of the messages is the gradient of the whole batch's loss.

A worker whose loss or gradient is not finite is left out: its message is 0 and has no weight, its
codec keeps its state, and the tokens of the others are the batch. Where too few are left, the
result is NaN, which the guard of the step refuses.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmoe.contrib.slow_links.codec import Codec, Payload
from jaxmoe.contrib.slow_links.exchange import About, Decode, Exchange, no_state
from jaxmoe.contrib.slow_links.fragments import Arrays, Leaf
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from sharding.constrain import place_like


class JointExchange(NamedTuple):
    """Way of the payloads of all parameters between workers."""

    init: Callable[[Arrays], Any]
    """Parameters -> state of a worker: arrays of the shapes of parameters, or scalars; zeros."""
    mix: Callable[
        [Mapping[str, Payload], Mapping[str, Decode], Arrays, Mapping[str, About], Any],
        tuple[dict[str, Array], Any],
    ]
    """({path: payload}, decoders, parameters, abouts, state) -> ({path: gradient}, state)."""
    copies: Callable[[int], float] = lambda workers: 2 * (workers - 1) / workers
    """Number of workers -> payloads that a worker sends in a mean exchange."""


class Agreed(NamedTuple):
    """What all workers know from their optimiser."""

    momentum: dict[str, Array]
    """First moments."""
    mask: dict[str, Array]
    """Numbers that are sent."""
    is_encoded: Bool[Array, ""]
    """Whether the step sends encoded messages; otherwise gradients are averaged."""


class Code(NamedTuple):
    """Parts of the batch whose gradients each worker combines."""

    parts: int
    """Parts of each worker: worker i has i, i + 1, ... modulo the number of workers."""
    factors: tuple[tuple[float, ...], ...]
    """Factor of worker i on each of its parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientMethod:
    """A method that exchanges gradients, as its config builds it."""

    codec: Callable[[Leaf, About | None], Codec]
    """Encoding of each parameter; without About that of the whole parameter."""
    exchange: JointExchange
    """Exchange of all parameters."""
    carry: float = 0.0
    """Share of the agreed momentum in a message."""
    agreed: Callable[[Any], Agreed] | None = None
    """State of the optimiser -> what all workers know from it; None for methods without."""
    code: Code | None = None
    """Parts of each worker; None where each has its own rows only."""
    may_lose: int | None = None
    """Number of workers that may be left out; None for all but one."""

    def step_bytes(self, leaves: Sequence[Leaf], workers: int) -> float:
        """Return the bytes that a worker sends in a step with encoded messages.

        Args:
            leaves: Trained parameters.
            workers: Number of workers.
        """
        bits = sum(self.codec(leaf, None).bits(leaf.shape) for leaf in leaves)
        return self.exchange.copies(workers) * bits / 8


# Not checked at run time: tree functions also fill records with shapes, specs and tracers.
@typing.no_type_check
@struct.dataclass
class GradientTalk:
    """State of the exchanges of all parameters, [R ...]."""

    codec: Any
    """{path: state} of each worker."""
    exchange: Any
    """State of the exchange of each worker."""


def separately(
    leaves: Mapping[str, Leaf], exchange: Callable[[Leaf, About | None], Exchange]
) -> JointExchange:
    """Return the exchange of each parameter by itself.

    Args:
        leaves: {path: what is known of a parameter}.
        exchange: Exchange of each parameter.
    """

    def init(params: Arrays) -> Any:
        return {path: exchange(leaves[path], None).init(x) for path, x in params.items()}

    def mix(payloads: Any, decodes: Any, params: Arrays, abouts: Any, state: Any) -> Any:
        mixed = {}
        after = {}
        for path, x in params.items():
            setting = abouts[path]
            mixed[path], after[path] = exchange(leaves[path], setting).mix(
                payloads[path], decodes[path], x, setting, state[path]
            )
        return mixed, after

    example = next(iter(leaves.values()))
    return JointExchange(init=init, mix=mix, copies=exchange(example, None).copies)


def mean_of_alive() -> Exchange:
    """Return the exchange whose result is the mean of the messages that count."""

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        assert setting.alive is not None  # set in every exchange of gradients
        count = jnp.sum(setting.alive).astype(slow.dtype)
        return jax.lax.psum(decode(payload, slow), setting.axis) / count, state

    return Exchange(init=no_state, mix=mix)


def begin_gradients(
    method: GradientMethod, leaves: Mapping[str, Leaf], params: Arrays, workers: Workers
) -> GradientTalk:
    """Return the state of the exchanges before the first step.

    Args:
        method: Method.
        leaves: {path: what is known of a parameter}.
        params: Trained parameters.
        workers: Workers.
    """
    codecs = {path: method.codec(leaves[path], None).init(x) for path, x in params.items()}
    return GradientTalk(
        codec=workers.stack(codecs), exchange=workers.stack(method.exchange.init(params))
    )


@typing.no_type_check
@struct.dataclass
class Contribution:
    """What each worker brings to an exchange, [R ...]."""

    grads: dict[str, Array]
    """Sum over its parts of factor * tokens * gradient."""
    tokens: Float[Array, "R P"]
    """Sum of the loss weights of each part."""
    is_finite: Bool[Array, " R"]
    """Whether its losses and gradients are finite."""


def exchange_gradients(
    method: GradientMethod,
    leaves: Mapping[str, Leaf],
    talk: GradientTalk,
    contribution: Contribution,
    params: Arrays,
    workers: Workers,
    *,
    number: Int[Array, ""],
    key: Key[Array, ""],
    agreed: Agreed | None = None,
    alive: Bool[Array, " R"] | None = None,
) -> tuple[dict[str, Array], GradientTalk, Bool[Array, "R P"]]:
    """Return the gradient, equal on all workers, the state, and the parts that count.

    Args:
        method: Method.
        leaves: {path: what is known of a parameter}.
        talk: State of the exchanges.
        contribution: Gradients of the workers.
        params: Trained parameters.
        workers: Workers.
        number: Number of the step.
        key: Key of the step.
        agreed: What all workers know from their optimiser.
        alive: Workers that answer; None for all.
    """
    splits = {path: _split(x) for path, x in params.items()}
    if agreed is not None:
        like_params = partial(jax.tree.map, place_like)
        agreed = agreed._replace(
            momentum=like_params(agreed.momentum, dict(params)),
            mask=like_params(agreed.mask, dict(params)),
        )
    flags = jnp.ones((workers.number,), bool) if alive is None else alive

    def mix(worker_state: Any, shared: Any) -> Any:
        contribution, talk = worker_state
        me = jax.lax.axis_index(workers.axis)
        is_finite = jax.lax.all_gather(contribution.is_finite, workers.axis)
        alive = shared["alive"] & is_finite
        counted = _count_parts(method, alive, me, workers.number)
        tokens = jax.lax.psum(jnp.sum(jnp.where(counted, contribution.tokens, 0.0)), workers.axis)
        parts = jax.lax.psum(jnp.sum(counted), workers.axis)
        scale = parts.astype(tokens.dtype) / jnp.where(tokens > 0.0, tokens, 1.0)
        # Selected, not multiplied: 0 times NaN is NaN.
        grads = {
            path: jnp.where(alive[me], x * scale.astype(x.dtype), jnp.zeros_like(x))
            for path, x in contribution.grads.items()
        }
        most = workers.number - 1 if method.may_lose is None else method.may_lose
        is_possible = jnp.sum(~alive) <= most
        keys = jax.random.split(jax.random.wrap_key_data(shared["key"]), len(grads))
        abouts = {
            path: About(
                shared["number"],
                keys[index],
                workers.axis,
                workers.number,
                leaves[path].axes,
                splits[path],
                workers.is_spread,
                alive,
                None if shared["agreed"] is None else shared["agreed"].mask[path],
            )
            for index, path in enumerate(grads)
        }
        mixed, after = _mix(method, leaves, grads, shared, abouts, talk, alive[me])
        nan = {path: jnp.full_like(x, jnp.nan) for path, x in mixed.items()}
        mixed = {path: jnp.where(is_possible, x, nan[path]) for path, x in mixed.items()}
        return (after, counted), mixed

    shared = {
        "params": dict(params),
        "number": number,
        "key": jax.random.key_data(key),
        "agreed": agreed,
        "alive": flags,
    }
    like = ((talk, contribution.tokens), dict(params))
    (talk, counted), mixed = workers.together(mix, like)((contribution, talk), shared)
    return mixed, talk, counted


def _mix(
    method: GradientMethod,
    leaves: Mapping[str, Leaf],
    grads: dict[str, Array],
    shared: Any,
    abouts: Mapping[str, About],
    talk: GradientTalk,
    is_alive: Bool[Array, ""],
) -> tuple[dict[str, Array], GradientTalk]:
    """Return the exchanged gradients of all parameters, and the state of this worker."""
    params = shared["params"]
    agreed = shared["agreed"]

    def encode(talk: GradientTalk) -> tuple[dict[str, Array], GradientTalk]:
        payloads = {}
        decodes = {}
        codec = {}
        for path, x in grads.items():
            setting = abouts[path]
            message = x
            mean_leaf = method.codec(leaves[path], setting)
            if agreed is not None:
                message = method.carry * agreed.momentum[path] + (1.0 - method.carry) * x
                message = jnp.where(agreed.mask[path] & is_alive, message, jnp.zeros_like(x))
            before = talk.codec[path]
            payloads[path], after = mean_leaf.encode(message.astype(x.dtype), before, setting.key)
            decodes[path] = mean_leaf.decode
            codec[path] = jax.tree.map(lambda n, o: jnp.where(is_alive, n, o), after, before)
        mixed, exchange = method.exchange.mix(payloads, decodes, params, abouts, talk.exchange)
        return mixed, GradientTalk(codec=codec, exchange=exchange)

    def average(talk: GradientTalk) -> tuple[dict[str, Array], GradientTalk]:
        mean_leaf = mean_of_alive()
        mixed = {
            path: mean_leaf.mix(x, lambda payload, like: payload, params[path], abouts[path], ())[0]
            for path, x in grads.items()
        }
        return mixed, talk

    if agreed is None:
        return encode(talk)
    return jax.lax.cond(agreed.is_encoded, encode, average, talk)


def _count_parts(
    method: GradientMethod, alive: Bool[Array, " R"], me: Int[Array, ""], workers: int
) -> Bool[Array, " P"]:
    """Return which parts of this worker count: those of which it is the first alive holder."""
    if method.code is None:
        return alive[me][None]
    parts = method.code.parts
    is_first = []
    for part in range(parts):
        # The worker that has part me + part as its part `place` is me + part - place.
        before = [alive[(me + part - place) % workers] for place in range(part)]
        is_first.append(alive[me] & ~jnp.any(jnp.stack([jnp.zeros((), bool), *before])))
    return jnp.stack(is_first)


def _split(x: Array) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that split each dimension of a parameter."""
    entries = jax.typeof(x).sharding.spec
    return tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)
