# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Directories of tiny Hugging Face models, written without `transformers`."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint import to_huggingface
from jaxmoe.checkpoint.huggingface.tokenizer import byte_tokenizer
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.scaling.initialize import parameter_table

END = "<|end|>"
"""Special token of the tokenizer, and end of text of the model."""


def tokenizer_json() -> dict:
    """Bytes, merges of some English words, and one special token."""
    found = byte_tokenizer()
    vocabulary, merges = found["model"]["vocab"], []
    for word in ("the", "\u0120the", "and", "\u0120and", "quick"):
        left = word[0]
        for character in word[1:]:
            if f"{left} {character}" not in merges:
                merges.append(f"{left} {character}")
                vocabulary.setdefault(left + character, len(vocabulary))
            left += character
    end = len(vocabulary)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    found["added_tokens"] = [{"id": end, "content": END, "special": True, **flags}]
    found["model"]["merges"] = merges
    return found


def write_model(place: pathlib.Path, *, has_tokenizer: bool = True) -> ModelConfig:
    """Write an OLMoE model of two layers whose values are not small, and its tokenizer."""
    tokenizer = tokenizer_json()
    end = tokenizer["added_tokens"][0]["id"]
    model = ModelConfig(
        vocab_size=end + 3,
        num_layers=2,
        embed_dim=24,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=12, qk_norm="full"),
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=10),
    )
    rng = np.random.default_rng(0)

    def value(row):
        if row.declaration.init == "ones":
            return jnp.ones(row.shape, jnp.float32)
        size = 2.0 / row.declaration.fan(0) ** 0.5
        return jnp.asarray(size * rng.standard_normal(row.shape), jnp.float32)

    params = parameter_table(model).tree(value)
    texts = {"tokenizer.json": json.dumps(tokenizer)} if has_tokenizer else {}
    to_huggingface(
        model,
        params,
        place,
        max_length=64,
        fields={"eos_token_id": end},
        texts=texts,
    )
    return model
