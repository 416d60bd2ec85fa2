# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The law of methods that exchange parameters: send, then merge.

    send    message = slow - own parameters, encoded and exchanged: the pseudo-gradient
    merge   slow = slow + outer(pseudo-gradient);  own = keep * own + (1 - keep) * slow

Every function takes one fragment, {path: array}. Arrays of workers have a leading [R]; arrays that
are equal on all workers are shared and have none.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int, Key

from jaxmoe.contrib.slow_links.codec import Codec
from jaxmoe.contrib.slow_links.exchange import About, Exchange
from jaxmoe.contrib.slow_links.fragments import Arrays, Fragment, Leaf, cut_fragments
from jaxmoe.contrib.slow_links.ownership import Ownership
from jaxmoe.contrib.slow_links.selective import SlowWorkers, either
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.weighting import Weighting, factors_of
from jaxmoe.contrib.slow_links.workers.arrays import Workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A method that exchanges parameters, as its config builds it."""

    timing: ExchangeTiming
    codec: Callable[[Leaf], Codec]
    """Encoding of each parameter."""
    exchange: Callable[[Leaf], Exchange]
    """Exchange of each parameter."""
    outer: optax.GradientTransformation | None
    """Update of the slow parameters from the pseudo-gradient; None: what arrives replaces them."""
    is_shared: bool = True
    """Whether the slow parameters are equal on all workers; all exchanges must say the same."""
    anchor: Literal["sent", "merged"] = "sent"
    """When own parameters are subtracted from the slow ones: as they are sent; or as they are
    merged, so that the parameters themselves travel."""
    weighting: Weighting | None = None
    """Weights of the workers' messages; None for equal ones."""
    slow: SlowWorkers | None = None
    """Workers whose messages are encoded otherwise; None if there are none."""
    owned: Ownership | None = None
    """Rows that one worker each trains and has the moments of; None if all train everything."""
    finish: Callable[[dict[str, Array], Int[Array, ""]], dict[str, Array]] | None = None
    """(shared slow parameters of a fragment after a merge, number of the exchange) -> changed."""

    def __post_init__(self):
        if self.outer is None and self.anchor == "sent":
            raise ValueError("a method without outer optimiser sends parameters: set anchor")
        if self.finish is not None and not self.is_shared:
            raise ValueError("only shared slow parameters can be finished: set is_shared")

    def fragments(self, leaves: Sequence[Leaf]) -> tuple[Fragment, ...]:
        """Return the fragments of the parameters."""
        return cut_fragments(leaves, self.timing.fragments)

    def until(self, last: int) -> Method:
        """Return the method for a run that ends with a step, after which all is exchanged."""
        return replace(self, timing=replace(self.timing, last=last))


@typing.no_type_check
@struct.dataclass
class Talk:
    """State of the exchanges of one fragment."""

    codec: Any
    """{path: state} of each worker, [R ...]."""
    exchange: Any
    """{path: state} of each worker, [R ...]."""
    slow: Any
    """{path: slow parameters} of each worker, [R ...]; None if they are shared."""
    outer: Any
    """State of the outer optimiser of each worker; None if it is shared."""
    weighting: Any = None
    """What gives the weight of each worker's next message, [R]; None for equal weights."""


def begin(method: Method, leaves: Mapping[str, Leaf], params: Arrays, workers: Workers) -> Talk:
    """Return the state of the exchanges of a fragment before the first step.

    Args:
        method: Method.
        leaves: What is known of each parameter.
        params: The fragment's parameters, equal on all workers.
        workers: Workers.
    """
    exchanges = {path: method.exchange(leaves[path]) for path in params}
    codecs = {path: method.codec(leaves[path]) for path in params}
    stacked = workers.stack(dict(params))
    return Talk(
        codec=workers.stack({path: codecs[path].init(x) for path, x in params.items()}),
        exchange=workers.stack({path: exchanges[path].init(x) for path, x in params.items()}),
        slow=None if method.is_shared else stacked,
        outer=None if method.is_shared else begin_outer(method, stacked),
        weighting=None if method.weighting is None else workers.stack(method.weighting.init()),
    )


def begin_outer(method: Method, slow: Arrays) -> Any:
    """Return the state of the outer optimiser of a fragment before the first step."""
    return () if method.outer is None else method.outer.init(dict(slow))


def send(
    method: Method,
    leaves: Mapping[str, Leaf],
    talk: Talk,
    params: Arrays,
    slow: Arrays | None,
    workers: Workers,
    *,
    number: Int[Array, ""],
    key: Key[Array, ""],
    is_beside: bool = False,
) -> tuple[dict[str, Array], Talk]:
    """Return the pseudo-gradient of a fragment, and the state after the exchange.

    Args:
        method: Method.
        leaves: What is known of each parameter.
        talk: State of the exchanges of the fragment.
        params: Parameters of the workers, [R ...].
        slow: Shared slow parameters; None if every worker has its own.
        workers: Workers.
        number: Number of the exchange, from 0.
        key: Key of the exchange.
        is_beside: Whether a step that does not need the result follows in the same program.
    """
    splits = {path: _split(x) for path, x in params.items()}
    weights, weighting = close_round(method, talk)

    def mix(worker_state: Any, shared: Any) -> Any:
        factors = None
        if worker_state["weight"] is not None:
            factors = factors_for(method, jax.lax.all_gather(worker_state["weight"], workers.axis))
        slow_params = shared["slow"]
        number = shared["number"]
        key = jax.random.wrap_key_data(shared["key"])
        mixed = {}
        codec = {}
        exchange = {}
        for index, (path, x) in enumerate(worker_state["params"].items()):
            leaf = leaves[path]
            state = worker_state["talk"]
            anchor = (
                slow_params[path] if worker_state["slow"] is None else worker_state["slow"][path]
            )
            codec_of = _codec(method, leaf, workers)
            exchange_of = method.exchange(leaf)
            leaf_key = jax.random.fold_in(key, index)
            message = anchor - x if method.anchor == "sent" else x
            payload, after = codec_of.encode(message, state.codec[path], leaf_key)
            if factors is not None:
                after = keep_state(worker_state["weight"] > 0.0, after, state.codec[path])
            codec[path] = after
            setting = About(
                number,
                leaf_key,
                workers.axis,
                workers.number,
                leaf.axes,
                splits[path],
                workers.is_spread,
                factors=factors,
                round_key=key,
                is_beside=is_beside,
            )
            mixed[path], exchange[path] = exchange_of.mix(
                payload, codec_of.decode, anchor, setting, state.exchange[path]
            )
        after = state_of(codec, exchange)
        return ((mixed, after), ()) if worker_state["slow"] is not None else (((), after), mixed)

    def state_of(codec: Any, exchange: Any) -> Talk:
        return Talk(codec=codec, exchange=exchange, slow=None, outer=None)

    state = state_of(talk.codec, talk.exchange)
    worker_state = {"params": dict(params), "talk": state, "slow": talk.slow, "weight": weights}
    shared = {"slow": slow, "number": number, "key": jax.random.key_data(key)}
    like = (((), state), slow) if talk.slow is None else ((dict(params), state), ())
    (mine, state), common = workers.together(mix, like)(worker_state, shared)
    result = common if talk.slow is None else mine
    after = replace(talk, codec=state.codec, exchange=state.exchange, weighting=weighting)
    return result, after


def close_round(method: Method, talk: Talk) -> tuple[Float[Array, " R"] | None, Any]:
    """Return the weights of the messages, None for equal ones, and what gives the next ones."""
    if method.weighting is None:
        return None, None
    return method.weighting.close(talk.weighting)


def factors_for(method: Method, weights: Float[Array, " R"]) -> Float[Array, " R"]:
    """Return the factors of all messages of a mean, from their weights."""
    # Without any weight a mean of differences is 0, but one of parameters is that of all.
    return factors_of(weights, 0.0 if method.anchor == "sent" else 1.0)


def keep_state(counts: Array, after: Any, before: Any) -> Any:
    """Return the state of a codec after a message if that counts, and the one before otherwise."""
    return jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, before)


def merge(
    method: Method,
    talk: Talk,
    pseudo: Arrays,
    params: Arrays,
    slow: Arrays | None,
    outer: Any,
    workers: Workers,
    *,
    number: Int[Array, ""],
) -> tuple[dict[str, Array], dict[str, Array] | None, Any, Talk]:
    """Return (own parameters, shared slow parameters, their outer state, talk) after a merge.

    Args:
        method: Method.
        talk: State of the exchanges of the fragment.
        pseudo: Pseudo-gradient.
        params: Parameters of the workers, [R ...].
        slow: Shared slow parameters; None if every worker has its own.
        outer: State of the shared outer optimiser; None without.
        workers: Workers.
        number: Number of the exchange, from 0.
    """
    before = talk.slow if slow is None else dict(slow)
    state = outer if talk.slow is None else talk.outer
    after = dict(pseudo)
    if method.outer is not None:
        if method.anchor == "merged":
            pseudo = jax.tree.map(jnp.subtract, before, after)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = method.outer.update(dict(pseudo), state, before)
        after = jax.tree.map(lambda x, u: x + u.astype(x.dtype), before, updates)
    if method.finish is not None:
        after = method.finish(after, number)
    target = workers.stack(after) if talk.slow is None else after
    keep = method.timing.keep
    # Copied without arithmetic where nothing is kept, so that workers are bitwise equal.
    local = (
        target
        if keep == 0.0
        else jax.tree.map(
            lambda x, t: (keep * x + (1.0 - keep) * t).astype(x.dtype), dict(params), target
        )
    )
    if talk.slow is None:
        return local, after, state, talk
    return local, None, None, replace(talk, slow=after, outer=state)


def mask_foreign(
    method: Method,
    leaves: Mapping[str, Leaf],
    worker: Int[Array, ""],
    arrays: Arrays,
    otherwise: Arrays,
) -> dict[str, Array]:
    """Return arrays of one worker where it trains the parameters, and others elsewhere.

    Args:
        method: Method.
        leaves: What is known of each parameter.
        worker: Number of the worker.
        arrays: {path: array}, such as gradients.
        otherwise: Arrays of the same shapes.
    """

    def choose(path: str, x: Array) -> Array:
        mask = None if method.owned is None else method.owned.mask(leaves[path], worker)
        return x if mask is None else jnp.where(mask, x, otherwise[path])

    return {path: choose(path, x) for path, x in arrays.items()}


def _codec(method: Method, leaf: Leaf, workers: Workers) -> Codec:
    """Return the encoding of a parameter by this worker."""
    codec = method.codec(leaf)
    slow = method.slow
    if slow is None or (narrow := slow.codec(leaf)) is None:
        return codec
    return either(codec, narrow, slow.is_slow(jax.lax.axis_index(workers.axis)))


def _split(x: Array) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that split each dimension of a parameter, without that of workers."""
    entries = jax.typeof(x).sharding.spec[1:]
    return tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in entries)
