# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Three small models without meshes, with the parameter trees of Llama, T5 and GPT-J.

Two layers each, in plain jnp, parameters named as their Flax versions name them. No caches, no
dropout; T5 has one relative bias for all layers of a stack, GPT-J adds both blocks to one input.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS = 32, 16, 4, 32, 2


def _kernel(key: Array, *shape: int) -> dict[str, Array]:
    return {"kernel": jax.random.normal(key, shape) * shape[0] ** -0.5}


def _table(key: Array, rows: int, width: int = WIDTH) -> dict[str, Array]:
    return {"embedding": jax.random.normal(key, (rows, width))}


def _gain() -> dict[str, Array]:
    return {"weight": jnp.ones(WIDTH)}


def _norm(x: Array, gain: dict[str, Array]) -> Array:
    return (
        x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gain["weight"][None, None]
    )


def _heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], HEADS, -1)


def _attend(q: Array, k: Array, v: Array, bias: Array | float, *, is_causal: bool) -> Array:
    scores = jnp.einsum("bsnh,bunh->bnsu", _heads(q), _heads(k)) * 4.0**-0.5 + bias
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[2:], bool))
        scores = jnp.where(mask[None, None], scores, -1e9)
    mixed = jnp.einsum("bnsu,bunh->bsnh", jax.nn.softmax(scores), _heads(v))
    return mixed.reshape(q.shape)


def _apply(params: dict[str, Array], x: Array) -> Array:
    y = x @ params["kernel"]
    return y + params["bias"][None, None] if "bias" in params else y


def _turn(x: Array) -> Array:
    """Rotary positions, on all of each head."""
    halves = jnp.split(_heads(x), 2, -1)
    rates = 0.5 ** jnp.arange(halves[0].shape[-1], dtype=jnp.float32)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    turned = jnp.concatenate(
        [halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin], -1
    )
    return turned.reshape(x.shape)


def llama_params(key: Array) -> dict[str, Any]:
    """Parameters with the names of FlaxLlamaForCausalLM."""
    keys = iter(jax.random.split(key, 64))

    def layer() -> dict[str, Any]:
        attention = {f"{n}_proj": _kernel(next(keys), WIDTH, WIDTH) for n in "qkvo"}
        mlp = {f"{n}_proj": _kernel(next(keys), WIDTH, HIDDEN) for n in ("gate", "up")}
        mlp["down_proj"] = _kernel(next(keys), HIDDEN, WIDTH)
        return {
            "self_attn": attention,
            "mlp": mlp,
            "input_layernorm": _gain(),
            "post_attention_layernorm": _gain(),
        }

    return {
        "model": {
            "embed_tokens": _table(next(keys), VOCAB),
            "layers": {str(i): layer() for i in range(LAYERS)},
            "norm": _gain(),
        },
        "lm_head": _kernel(next(keys), WIDTH, VOCAB),
    }


def llama(params: dict[str, Any], tokens: Array) -> Array:
    """Logits [B S V]."""
    model = params["model"]
    x = model["embed_tokens"]["embedding"][tokens]
    for i in range(LAYERS):
        layer = model["layers"][str(i)]
        attention, mlp = layer["self_attn"], layer["mlp"]
        h = _norm(x, layer["input_layernorm"])
        q, k, v = (_apply(attention[f"{n}_proj"], h) for n in "qkv")
        x = x + _apply(attention["o_proj"], _attend(_turn(q), _turn(k), v, 0.0, is_causal=True))
        h = _norm(x, layer["post_attention_layernorm"])
        hidden = jax.nn.silu(_apply(mlp["gate_proj"], h)) * _apply(mlp["up_proj"], h)
        x = x + _apply(mlp["down_proj"], hidden)
    return _apply(params["lm_head"], _norm(x, model["norm"]))


def t5_params(key: Array) -> dict[str, Any]:
    """Parameters with the names of FlaxT5ForConditionalGeneration (version 1.1)."""
    keys = iter(jax.random.split(key, 128))

    def attention(has_bias: bool = False) -> dict[str, Any]:
        made: dict[str, Any] = {n: _kernel(next(keys), WIDTH, WIDTH) for n in "qkvo"}
        if has_bias:
            made["relative_attention_bias"] = _table(next(keys), 8, HEADS)
        return made

    def block(i: int, is_decoder: bool) -> dict[str, Any]:
        dense = {n: _kernel(next(keys), WIDTH, HIDDEN) for n in ("wi_0", "wi_1")}
        dense["wo"] = _kernel(next(keys), HIDDEN, WIDTH)
        parts = [{"SelfAttention": attention(i == 0), "layer_norm": _gain()}]
        if is_decoder:
            parts.append({"EncDecAttention": attention(), "layer_norm": _gain()})
        parts.append({"DenseReluDense": dense, "layer_norm": _gain()})
        return {"layer": {str(j): part for j, part in enumerate(parts)}}

    def stack(is_decoder: bool) -> dict[str, Any]:
        blocks = {str(i): block(i, is_decoder) for i in range(LAYERS)}
        return {"block": blocks, "final_layer_norm": _gain()}

    return {
        "shared": _table(next(keys), VOCAB),
        "encoder": stack(False),
        "decoder": stack(True),
        "lm_head": _kernel(next(keys), WIDTH, VOCAB),
    }


def _t5_stack(params: dict[str, Any], x: Array, memory: Array | None) -> Array:
    distance = jnp.abs(jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None])
    first = params["block"]["0"]["layer"]["0"]["SelfAttention"]["relative_attention_bias"]
    bias = first["embedding"][jnp.minimum(distance, 7)].transpose(2, 0, 1)[None]
    for i in range(LAYERS):
        parts = params["block"][str(i)]["layer"]
        for part in (parts[str(j)] for j in range(len(parts))):
            h = _norm(x, part["layer_norm"])
            if "DenseReluDense" in part:
                dense = part["DenseReluDense"]
                hidden = jax.nn.gelu(_apply(dense["wi_0"], h)) * _apply(dense["wi_1"], h)
                x = x + _apply(dense["wo"], hidden)
                continue
            is_self = "SelfAttention" in part
            weights = part["SelfAttention" if is_self else "EncDecAttention"]
            source = h if is_self or memory is None else memory
            q, k, v = _apply(weights["q"], h), *(_apply(weights[n], source) for n in "kv")
            mixed = _attend(
                q, k, v, bias if is_self else 0.0, is_causal=is_self and memory is not None
            )
            x = x + _apply(weights["o"], mixed)
    return _norm(x, params["final_layer_norm"])


def t5(params: dict[str, Any], tokens: Array) -> Array:
    """Logits [B S V] of an encoder and a decoder that both read the tokens."""
    table = params["shared"]["embedding"]
    memory = _t5_stack(params["encoder"], table[tokens], None)
    return _apply(params["lm_head"], _t5_stack(params["decoder"], table[tokens], memory))


def gptj_params(key: Array) -> dict[str, Any]:
    """Parameters with the names of FlaxGPTJForCausalLM."""
    keys = iter(jax.random.split(key, 64))

    def layer() -> dict[str, Any]:
        attention = {f"{n}_proj": _kernel(next(keys), WIDTH, WIDTH) for n in ("q", "k", "v", "out")}
        mlp = {
            "fc_in": _kernel(next(keys), WIDTH, HIDDEN) | {"bias": jnp.zeros(HIDDEN)},
            "fc_out": _kernel(next(keys), HIDDEN, WIDTH) | {"bias": jnp.zeros(WIDTH)},
        }
        return {"attn": attention, "mlp": mlp, "ln_1": _gain()}

    return {
        "transformer": {
            "wte": _table(next(keys), VOCAB),
            "h": {str(i): layer() for i in range(LAYERS)},
            "ln_f": _gain(),
        },
        "lm_head": _kernel(next(keys), WIDTH, VOCAB) | {"bias": jnp.zeros(VOCAB)},
    }


def gptj(params: dict[str, Any], tokens: Array) -> Array:
    """Logits [B S V]."""
    model = params["transformer"]
    x = model["wte"]["embedding"][tokens]
    for i in range(LAYERS):
        layer = model["h"][str(i)]
        attention, mlp = layer["attn"], layer["mlp"]
        h = _norm(x, layer["ln_1"])
        q, k, v = (_apply(attention[f"{n}_proj"], h) for n in "qkv")
        mixed = _attend(_turn(q), _turn(k), v, 0.0, is_causal=True)
        hidden = jax.nn.gelu(_apply(mlp["fc_in"], h))
        x = x + _apply(attention["out_proj"], mixed) + _apply(mlp["fc_out"], hidden)
    return _apply(params["lm_head"], _norm(x, model["ln_f"]))


# Name: parameters, forward pass, sums over the tensor axis in it: one per block of attention, one
# per feed-forward block and one for the look-up of embeddings. Of GPT-J, whose two blocks are added
# to one another, XLA adds the parts and sums them once.
FOREIGN = {
    "llama": (llama_params, llama, 2 * LAYERS + 1),
    "t5": (t5_params, t5, 2 * LAYERS + 3 * LAYERS + 1),
    "gptj": (gptj_params, gptj, LAYERS + 1),
}
