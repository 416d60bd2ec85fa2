# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Codecs: what of an array travels, and what a worker remembers of the rest.

A codec works on one parameter of one worker, as a device holds it. `encode` returns a payload, a
tree of arrays that travels unchanged; `decode` turns a payload into an array. A codec's state is a
tree of arrays, each with the shape of the parameter or a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Key

Payload = Any
"""Tree of arrays that travels."""


class Codec(NamedTuple):
    """Encoding of one parameter."""

    init: Callable[[Array], Any]
    """Parameter -> state, zeros."""
    encode: Callable[[Array, Any, Key[Array, ""]], tuple[Payload, Any]]
    """(array, state, key that all workers share) -> (payload, state)."""
    decode: Callable[[Payload, Array], Array]
    """(payload, array of the shape and dtype of the result) -> array."""
    bits: Callable[[tuple[int, ...]], int]
    """Shape of a parameter -> bits of its payload."""
    is_plain: bool = False
    """Whether the payload is the array itself, so that payloads may be summed."""


def plain() -> Codec:
    """Return the codec that sends arrays as they are."""
    return Codec(
        init=lambda x: (),
        encode=lambda x, state, key: (x, state),
        decode=lambda payload, like: payload,
        bits=lambda shape: 32 * math.prod(shape),
        is_plain=True,
    )


def error_feedback(codec: Codec, decay: float = 1.0) -> Codec:
    """Return a codec that adds what was not sent to the next message.

    z = decay * e + x;  sent = C(z);  e = z - sent

    Args:
        codec: Codec C.
        decay: Factor on the error from one message to the next.
    """

    def encode(x: Array, state: Any, key: Key[Array, ""]) -> tuple[Payload, Any]:
        error, inner = state
        target = decay * error + x
        payload, inner = codec.encode(target, inner, key)
        return payload, (target - codec.decode(payload, target), inner)

    return codec._replace(
        init=lambda x: (jnp.zeros_like(x), codec.init(x)), encode=encode, is_plain=False
    )


def controlled_codec(codec: Codec, gain: float) -> Codec:
    """Return a codec that sends increments of what receivers hold (EControl, arXiv 2311.05645).

    sent = C(gain * e + x - h);  e = e + x - h - sent;  h = h + sent

    Receivers add the increments up. A gain of 0 is EF21.

    Args:
        codec: Codec C.
        gain: Share of the error in a message.
    """

    def encode(x: Array, state: Any, key: Key[Array, ""]) -> tuple[Payload, Any]:
        error, estimate, inner = state
        payload, inner = codec.encode(gain * error + x - estimate, inner, key)
        sent = codec.decode(payload, x)
        return payload, (error + x - estimate - sent, estimate + sent, inner)

    return codec._replace(
        init=lambda x: (jnp.zeros_like(x), jnp.zeros_like(x), codec.init(x)),
        encode=encode,
        is_plain=False,
    )
