# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each mixer as a loop over the positions of each row: slow, in float32, by its equations."""

import jax
import jax.numpy as jnp


def by_position(segments, step, state=None):
    """Return the outputs of `step` at each position, zeros at padding [B S ...].

    Args:
        x: Arrays [B S ...] by name.
        segments: Documents [B S], 0 for padding, as numpy has them.
        step: Function from the state, the row and the places of a document up to now to the new
            state and the output.
        state: State before a document.
    """
    rows = []
    for row in range(segments.shape[0]):
        outputs = []
        document = current = None
        places = []
        for place, segment in enumerate(segments[row]):
            if segment == 0:
                outputs.append(jnp.zeros_like(outputs[-1]))
                continue
            if segment != document:
                document, current, places = segment, state, []
            places = [*places, place]
            current, output = step(current, row, places)
            outputs.append(output)
        rows.append(jnp.stack(outputs))
    return jnp.stack(rows)


def convolved(x, taps, row, places, bias=0.0):
    """Return the convolution at the last place of a document."""
    length = taps.shape[0]
    return bias + sum(
        taps[length - 1 - back] * x[row, place]
        for back, place in enumerate(reversed(places[-length:]))
    )


def short_convolution(config, params, x, segments):
    b, c, x = (x @ params[name] + params[f"{name}_in_bias"] for name in "bcx")
    product = b * x

    def step(state, row, places):
        y = convolved(product, params["taps"], row, places, params["bias"])
        return state, c[row, places[-1]] * y

    y = by_position(segments, step)
    return y @ params["o"] + params["o_bias"]


def corrected(state, q, k, v, decay, beta):
    """Return the states [N K V] of all heads after the delta rule, and the outputs [N V].

    Args:
        state: States before.
        q: Query of each head, of any norm.
        k: Key of each head, of any norm.
        v: Value of each head.
        decay: Factor of each state, or of each of its rows.
        beta: Strength of writing of each head.
    """
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    state = jnp.reshape(decay, (len(decay), -1, 1)) * state
    error = v - jnp.einsum("nkv,nk->nv", state, k)
    state = state + jnp.einsum("n,nk,nv->nkv", beta, k, error)
    return state, jnp.einsum("nkv,nk->nv", state, q) / jnp.sqrt(q.shape[-1])


def normed(y, gain):
    return gain * y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)


def gated_delta(config, params, x, segments):
    z = jnp.einsum("bsd,dnh->bsnh", x, params["z"])
    rates = jnp.exp(params["a_log"]) * jax.nn.softplus(x @ params["dt"] + params["dt_bias"])
    return delta(config, params, x, segments, jnp.exp(-rates), jax.nn.silu(z))


def kimi_delta(config, params, x, segments):
    z = jnp.einsum("bsr,rnh->bsnh", x @ params["gate_in"], params["gate_out"])
    steps = jnp.einsum("bsr,rnh->bsnh", x @ params["decay_in"], params["decay_out"])
    rates = jnp.exp(params["a_log"])[:, None] * jax.nn.softplus(steps + params["dt_bias"])
    return delta(config, params, x, segments, jnp.exp(-rates), jax.nn.sigmoid(z))


def bounded_delta(config, params, x, segments):
    z, steps = (jnp.einsum("bsd,dnh->bsnh", x, params[name]) for name in ("z", "decay"))
    steps = jnp.exp(params["a_log"])[:, None] * (steps + params["dt_bias"])
    decay = jnp.exp(config.decay_floor * jax.nn.sigmoid(steps))
    return delta(config, params, x, segments, decay, jax.nn.sigmoid(z))


def delta(config, params, x, segments, decay, gate):
    """Return the layer of a delta rule.

    Args:
        config: Mixer.
        params: Parameters.
        x: Inputs.
        segments: Documents.
        decay: Factors [B S N] or [B S N K] of states.
        gate: Factors [B S N V] of normed outputs.
    """
    projected = {name: jnp.einsum("bsd,dnh->bsnh", x, params[name]) for name in "qkv"}
    beta = jax.nn.sigmoid(x @ params["beta"])

    def step(states, row, places):
        q, k, v = (
            jax.nn.silu(convolved(projected[name], params[f"{name}_taps"], row, places))
            for name in "qkv"
        )
        at = (row, places[-1])
        size = config.num_heads // config.num_key_heads
        q, k = (jnp.repeat(x, size, axis=0) for x in (q, k))
        states, y = corrected(states, q, k, v, decay[at], beta[at])
        return states, normed(y, params["norm"]) * gate[at]

    states = jnp.zeros((config.num_heads, config.key_dim, config.head_dim))
    y = by_position(segments, step, states)
    return jnp.einsum("bsnv,nvd->bsd", y, params["o"])


def lightning(config, params, x, segments):
    projected = {name: jnp.einsum("bsd,dnh->bsnh", x, params[name]) for name in "qkvz"}
    decay = jnp.exp(jnp.array([-(2.0 ** (-8 * (n + 1) / config.num_heads)) for n in range(3)]))

    def step(states, row, places):
        at = (row, places[-1])
        q, k, v = (jax.nn.silu(projected[name][at]) for name in "qkv")
        states = decay[:, None, None] * states + jnp.einsum("nk,nv->nkv", k, v)
        y = jnp.einsum("nkv,nk->nv", states, q)
        y = params["norm"] * y / jnp.sqrt(jnp.mean(y * y) + 1e-6)
        return states, y * jax.nn.sigmoid(projected["z"][at])

    y = by_position(segments, step, jnp.zeros((3, config.head_dim, config.head_dim)))
    return jnp.einsum("bsnh,nhd->bsd", y, params["o"])


def rotary_lightning(config, params, x, segments):
    projected = {name: jnp.einsum("bsd,dnh->bsnh", x, params[name]) for name in "qkvz"}
    # Of 6 heads the first 4 have the slopes of 4, the others every second one of 8.
    decay = jnp.exp(-jnp.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]))
    rates = config.rope_theta ** (-jnp.arange(0.0, 1.0, 2.0 / config.rotary_dim))

    def turned(head, place):
        half = config.rotary_dim // 2
        first, second, rest = head[:, :half], head[:, half : 2 * half], head[:, 2 * half :]
        cos, sin = jnp.cos(place * rates), jnp.sin(place * rates)
        pair = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate([*pair, rest], axis=-1)

    def step(states, row, places):
        at = (row, places[-1])
        q, k = (turned(normed(projected[x][at], params[f"{x}_norm"]), at[1]) for x in "qk")
        written = jnp.einsum("nk,nv->nkv", k, projected["v"][at])
        states = decay[:, None, None] * states + written
        y = jnp.einsum("nkv,nk->nv", states, q) / jnp.sqrt(config.head_dim)
        groups = y.reshape(config.norm_groups, -1)
        groups = groups / jnp.sqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + 1e-6)
        y = groups.reshape(y.shape) * params["norm"]
        return states, y * jax.nn.sigmoid(projected["z"][at])

    y = by_position(segments, step, jnp.zeros((6, config.head_dim, config.head_dim)))
    return jnp.einsum("bsnh,nhd->bsd", y, params["o"])


LOOPS = {
    "short_convolution": short_convolution,
    "gated_delta": gated_delta,
    "kimi_delta": kimi_delta,
    "bounded_delta": bounded_delta,
    "lightning": lightning,
    "rotary_lightning": rotary_lightning,
}
