# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A dense MoE layer: the oracle of routing, capacity, dispatch, experts and combine.

Who goes where is decided in numpy by loops over tokens and experts; what comes out is computed for
every token by every expert and multiplied by a gate that is mostly 0. Nothing is sorted, gathered,
dispatched or sharded, and nothing is imported from the library.
"""

import jax
import jax.numpy as jnp
import numpy as np


def choose(logits: np.ndarray, top_k: int, token_mask: np.ndarray) -> np.ndarray:
    """[T E] bool: the experts of each token, those of largest logit; of equals the first."""
    chosen = np.zeros(logits.shape, bool)
    for token in range(logits.shape[0]):
        if not token_mask[token]:
            continue
        for _ in range(top_k):
            best = None
            for expert in range(logits.shape[1]):
                if chosen[token, expert]:
                    continue
                if best is None or logits[token, expert] > logits[token, best]:
                    best = expert
            chosen[token, best] = True
    return chosen


def drop(
    chosen: np.ndarray, priority: np.ndarray, capacity: int, sequence_length: int
) -> np.ndarray:
    """[T E] bool: what remains when an expert takes at most `capacity` tokens of a sequence.

    Args:
        chosen: from `choose`.
        priority: [T E]; of a sequence's tokens the expert takes those of largest priority, of
            equals the first.
        capacity: C.
        sequence_length: S; tokens are whole sequences, one after the other.
    """
    kept = np.zeros_like(chosen)
    for start in range(0, chosen.shape[0], sequence_length):
        for expert in range(chosen.shape[1]):
            asking = [t for t in range(start, start + sequence_length) if chosen[t, expert]]
            asking.sort(key=lambda t: -priority[t, expert])  # a stable sort keeps the order
            for token in asking[:capacity]:
                kept[token, expert] = True
    return kept


def gates(logits: jax.Array, chosen: np.ndarray, kind: str) -> jax.Array:
    """[T E] f32: `softmax` over all experts, `renormalized` over the chosen, `sqrt` of that."""
    if kind == "softmax":
        return jax.nn.softmax(logits, axis=-1) * chosen.astype(np.float32)
    is_real = chosen.any(-1, keepdims=True)
    shares = jax.nn.softmax(jnp.where(chosen | ~is_real, logits, -jnp.inf), axis=-1)
    # The slope of a square root at 0 is infinite: take it where the share is not 0.
    shares = jnp.where(chosen, shares, 1.0)
    return jnp.where(chosen, jnp.sqrt(shares) if kind == "sqrt" else shares, 0.0)


def swiglu(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """[T D] through one SwiGLU: gate_up [D 2 F], down [F D]."""
    return (jax.nn.silu(x @ gate_up[:, 0]) * (x @ gate_up[:, 1])) @ down


def decide(
    params: dict,
    x: jax.Array,
    *,
    top_k: int,
    gate: str,
    token_mask: np.ndarray | None = None,
    capacity: int | None = None,
    keep: str = "gate",
    sequence_length: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Chosen and kept pairs, which have no gradient: `chosen` and `kept`, both [T E] bool.

    Args:
        params: see `dense_moe`.
        x: see `dense_moe`.
        top_k: K.
        gate: see `gates`.
        token_mask: False for padding.
        capacity: C, nothing is dropped when None.
        keep: "gate" or "position".
        sequence_length: S; all tokens are one sequence when None.
    """
    mask = np.ones(x.shape[0], bool) if token_mask is None else np.asarray(token_mask)
    logits = x @ params["router"]["weight"]
    chosen = choose(np.asarray(logits), top_k, mask)
    if capacity is None:
        return chosen, chosen
    priority = np.asarray(gates(logits, chosen, gate))
    if keep == "position":
        priority = np.zeros_like(priority)
    return chosen, drop(chosen, priority, capacity, sequence_length or x.shape[0])


def dense_moe(
    params: dict, x: jax.Array, chosen: np.ndarray, kept: np.ndarray, *, gate: str
) -> jax.Array:
    """The layer's output [T D], differentiable in `params` and `x`.

    Args:
        params: of the library's MoE layer: router/weight, experts/gate_up, experts/down, and
            shared/gate_up, shared/down where there are shared experts.
        x: [T D] f32.
        chosen: from `decide`; gates are taken over these.
        kept: from `decide`; the gates of the others become 0.
        gate: see `gates`.
    """
    weights = jnp.where(kept, gates(x @ params["router"]["weight"], chosen, gate), 0.0)
    experts = params["experts"]
    routed = jnp.zeros_like(x)
    for expert in range(chosen.shape[1]):
        output = swiglu(x, experts["gate_up"][expert], experts["down"][expert])
        routed += weights[:, expert][:, None] * output
    if "shared" not in params:
        return routed
    shared = swiglu(x, params["shared"]["gate_up"], params["shared"]["down"])
    if gate == "sqrt":
        return (routed + shared) * np.float32(np.sqrt(0.5))
    return routed + shared
