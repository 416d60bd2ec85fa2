# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models with a module for multi-token prediction, as published weights have them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np

from tests.support.huggingface_models import read

NUMBERED = ("deepseek_v3", "glm4_moe")
LAYER_2 = "model.layers.2."
PLACES = {
    "deepseek_v3": ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "eh_proj.weight"),
    "qwen3_next": (
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
        "mtp.fc.weight",
    ),
}
"""Names of the norms of tokens, states and head, and of the projection."""


class Published(NamedTuple):
    """A model with a module, as published weights have it, and the whole as layers alone."""

    config: dict[str, Any]
    state: dict[str, np.ndarray]
    tokens: np.ndarray
    layered_config: dict[str, Any]
    """Config of a model whose last layer is that of the module."""
    layered_state: dict[str, np.ndarray]
    """Its tensors."""


def with_module(name: str) -> Published:
    """Return a golden model with a module, whose layer is like the last one of the model."""
    golden = read(name)
    layered_config = copy.deepcopy(golden.config)
    last = layered_config["num_hidden_layers"] - 1
    layered_state = dict(golden.state)
    if name == "qwen3_next":  # the last layer of the golden model is of another kind
        layered_config |= {"mlp_only_layers": []}
        layered_config["layer_types"] = ["linear_attention", "full_attention", "full_attention"]
        layered_state = {k: v for k, v in layered_state.items() if not k.startswith(LAYER_2)}
        for key in [key for key in layered_state if key.startswith("model.layers.1.")]:
            layered_state[key.replace("model.layers.1.", LAYER_2)] = layered_state[key] * 0.75
    rng = np.random.default_rng(0)
    width = layered_config["hidden_size"]

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16).astype(np.float32)

    centre = 0 if name == "qwen3_next" else 1
    norms = [centre + 0.1 * drawn(width) for _ in range(3)]
    block, places = LAYER_2, tuple(LAYER_2 + place for place in PLACES["deepseek_v3"])
    config = layered_config | {"num_hidden_layers": last}
    if name == "qwen3_next":
        block, places = "mtp.layers.0.", PLACES["qwen3_next"]
        config["layer_types"] = layered_config["layer_types"][:last]
    else:
        config["num_nextn_predict_layers"] = 1
    state = {key.replace(LAYER_2, block): value for key, value in layered_state.items()}
    state |= dict(zip(places, [*norms, 0.2 * drawn(width, 2 * width)], strict=True))
    if name in NUMBERED:
        state[f"{block}embed_tokens.weight"] = state["model.embed_tokens.weight"]
        state[f"{block}shared_head.head.weight"] = state["lm_head.weight"]
    return Published(config, state, golden.tokens, layered_config, layered_state)
