# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges that leave the program: the message of one worker, and the update from all messages.

Each site is a job of its own with one worker. It trains alone, encodes its message on the
device, and is given the messages of all sites as bytes. Where the mean of the messages is the
exchange of a method, the result equals that of the workers of one program.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.contrib.slow_links.fragments import Fragment, flat
from jaxmoe.contrib.slow_links.method import close_round, factors_for, keep_state
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from jaxmoe.contrib.slow_links.workers.routers import total_of
from jaxmoe.contrib.slow_links.workers.state import Arrived, WorkerTraining
from jaxmoe.contrib.slow_links.workers.step import merge_arrived
from jaxmoe.state_tree import is_key
from jaxmoe.training.state import TrainState


class BetweenJobs:
    """Halves of the exchanges of a site.

    Args:
        training: Method, with one worker.

    Raises:
        ValueError: The method merges late, or its exchange is not the mean of messages.
    """

    def __init__(self, training: WorkerTraining):
        self._training = training
        method = training.method
        if method.timing.delay:
            raise ValueError(
                f"replicas.delay={method.timing.delay}: sites merge what they exchange at once;"
                " set replicas.delay to 0"
            )
        if not all(method.exchange(leaf).is_mean for leaf in training.leaves.values()):
            raise ValueError(
                "sites exchange means, and this method exchanges otherwise: choose"
                " replicas:diloco, or a method whose workers average their messages"
            )

    def due(self, step: int) -> list[Fragment]:
        """Return the fragments that are exchanged after a step, in their order."""
        timing = self._training.method.timing
        parts = self._training.fragments
        return [part for part in parts if timing.sends(part.number, step) or timing.ends(step)]

    def rounds_before(self, step: int) -> int:
        """Return the number of exchanges, of any fragment, up to a step of this run."""
        timing = self._training.method.timing
        parts = [part.number for part in self._training.fragments]
        if timing.ends(step):
            return sum(max(timing.round(part, step), 0) + 1 for part in parts)
        return sum(max(timing.round(part, step + 1), 0) for part in parts)

    def encode(self, fragment: Fragment, state: TrainState) -> tuple[Any, TrainState]:
        """Return the message of this worker, and the state after it was encoded."""
        return self._encode[fragment.number](state)

    def merge(self, fragment: Fragment, state: TrainState, messages: Sequence[Any]) -> TrainState:
        """Return the state after an update with the messages of all members, in their order."""
        stacked = jax.tree.map(lambda *parts: np.stack(parts), *messages)
        return self._merge[fragment.number](state, stacked)

    def like(self, fragment: Fragment, state: TrainState) -> Any:
        """Return the shapes of a message."""
        message, _ = jax.eval_shape(partial(self._encode_fragment, fragment), state)
        return message

    @cached_property
    def _encode(self) -> list[Any]:
        return [jax.jit(partial(self._encode_fragment, part)) for part in self._training.fragments]

    @cached_property
    def _merge(self) -> list[Any]:
        return [jax.jit(partial(self._merge_stacked, part)) for part in self._training.fragments]

    def _encode_fragment(self, fragment: Fragment, state: TrainState) -> tuple[Any, TrainState]:
        training = self._training
        local = local_of(state)
        number = fragment.number
        method = training.method
        talk = local.talks[number]
        slow = fragment.take(flat(state.params))
        params = fragment.take(flat(local.params), leading=1)
        key = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), number)
        weights, weighting = close_round(method, talk)
        payloads: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for index, path in enumerate(sorted(params)):
            codec = method.codec(training.leaves[path])
            x = jnp.squeeze(params[path], 0)
            codec_state = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), talk.codec[path])
            sent = slow[path] - x if method.anchor == "sent" else x
            payloads[path], after = codec.encode(sent, codec_state, jax.random.fold_in(key, index))
            if weights is not None:
                after = keep_state(weights[0] > 0.0, after, codec_state)
            states[path] = jax.tree.map(lambda leaf: leaf[None], after)
        past = local.past
        if number == 0 and past is not None:
            past = jax.tree.map(jnp.zeros_like, past)
        talk = replace(talk, codec=states, weighting=weighting)
        talks = tuple(talk if i == number else t for i, t in enumerate(local.talks))
        message: dict[str, Any] = {"payloads": payloads}
        if weights is not None:
            message["weight"] = weights[0]
        if number == 0 and local.past is not None:
            message["total"] = total_of(local.past, state.step)
        state = replace(state, skipped=jnp.sum(local.skipped))
        return message, with_local(state, replace(local, talks=talks, past=past))

    def _merge_stacked(self, fragment: Fragment, state: TrainState, stacked: Any) -> TrainState:
        training = self._training
        slow = fragment.take(flat(state.params))
        members = {leaf.shape[0] for leaf in jax.tree.leaves(stacked)}.pop()
        factors = None
        if "weight" in stacked:
            factors = factors_for(training.method, jnp.asarray(stacked["weight"]))

        def mean(path: str, like: Array) -> Array:
            decode = training.method.codec(training.leaves[path]).decode
            each = [
                decode(_at(stacked["payloads"][path], member), like) for member in range(members)
            ]
            if factors is not None:
                each = [x * factors[member].astype(x.dtype) for member, x in enumerate(each)]
            return sum(each[1:], each[0]) / members  # in the order of members, on all sites

        pseudo = {path: mean(path, like) for path, like in slow.items()}
        total: Any = None
        if "total" in stacked:
            total = jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked["total"])
        arrived = Arrived(pseudo=pseudo, total=total, last=state.step)
        return merge_arrived(training, fragment, arrived, state)


def _at(tree: Any, member: int) -> Any:
    return jax.tree.map(lambda x: x[member], tree)


def to_bytes(tree: Any) -> bytes:
    """Return the arrays of a tree as bytes, in the order of its leaves."""
    leaves = jax.tree.leaves(jax.tree.map(_plain, tree))
    return b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.device_get(leaves))


def from_bytes(data: bytes, like: Any) -> Any:
    """Return a tree from its bytes, as numpy arrays; keys as keys.

    Args:
        data: Result of `to_bytes`.
        like: Arrays, or shapes and dtypes, of the tree.

    Raises:
        ValueError: The bytes are of another length.
    """
    if len(data) != (size := num_bytes(like)):
        raise ValueError(f"{len(data)} bytes do not hold {size} bytes of arrays")
    leaves, structure = jax.tree.flatten(like)
    parts = []
    start = 0
    for leaf in leaves:
        dtype, shape = _store(leaf)
        end = start + math.prod(shape) * dtype.itemsize
        array = np.frombuffer(data[start:end], dtype).reshape(shape)
        parts.append(jax.random.wrap_key_data(jnp.asarray(array)) if is_key(leaf) else array)
        start = end
    return jax.tree.unflatten(structure, parts)


def is_finite(message: Any) -> bool:
    """Return whether every floating-point number of a message is finite."""
    return all(
        np.isfinite(np.asarray(leaf, np.float32)).all()
        for leaf in jax.tree.leaves(message)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def num_bytes(like: Any) -> int:
    """Return the size of `to_bytes` of a tree."""
    stored = map(_store, jax.tree.leaves(like))
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in stored)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _store(leaf: Any) -> tuple[np.dtype, tuple[int, ...]]:
    """Return dtype and shape of a leaf as bytes."""
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return np.dtype(data.dtype), data.shape
    return np.dtype(leaf.dtype), leaf.shape


def digest(state: TrainState) -> bytes:
    """Return a digest of what sites must have in common: parameters, outer and router state."""
    common = (state.params, state.opt_state, state.router_state)
    return hashlib.sha256(to_bytes(common)).digest()
