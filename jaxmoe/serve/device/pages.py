# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Allocates the pages of keys and values on devices, and refuses models that pages cannot serve.

A step computes tokens of several sequences side by side. What a token computes may therefore depend
on the tokens before it through attention alone, and keys and values must not change later.
"""

from __future__ import annotations

from typing import Any

from jaxmoe.execution import ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.device.step import Pools


def initial_pools(model: ModelConfig, execution: ServedConfig, *, pages: int, size: int) -> Pools:
    """Return empty pages for all layers, cut as the mesh is.

    Args:
        model: Layers.
        execution: Precision and placement.
        pages: Number of pages.
        size: Positions of a page.
    """
    return {
        stack.path: stack.kind.mixer.initial_pages(
            execution, layers=stack.num_calls, pages=pages, size=size
        )
        for stack in model.stacks
    }


def page_bytes(model: ModelConfig, execution: ServedConfig, size: int) -> int:
    """Return the bytes of one page in all layers.

    Args:
        model: Layers.
        execution: Precision.
        size: Positions of a page.
    """
    return size * sum(
        stack.kind.mixer.cache_bytes_per_token(execution.precision, layers=stack.num_calls)
        for stack in model.stacks
    )


def check_served(model: ModelConfig) -> None:
    """Refuse a model whose tokens cannot be computed side by side with those of other requests.

    Args:
        model: Config of the model.

    Raises:
        ValueError: It is not causal, or has a mixer without pages or a feed-forward in which a
            token depends on others; the message names the field and the way out.
    """
    if not model.attention.is_causal:
        raise ValueError(
            "model.attention.is_causal=False: this model fills gaps from both sides, and requests"
            " are answered from left to right: sample it with jaxmoe.models.diffuse"
        )
    for kind in model.kinds:
        _check_mixer(kind.mixer)
        _check_feed_forward(kind.feed_forward)


def _check_mixer(mixer: Any) -> None:
    if not mixer.has_pages:
        raise ValueError(
            f"model.layers has the mixer {mixer.name!r}, which keeps no keys and values in pages:"
            " generate with jaxmoe.generate, or serve a model with grouped_query attention"
        )


def _check_feed_forward(feed_forward: Any) -> None:
    if feed_forward.keeps_order:
        raise ValueError(
            "model.moe.capacity drops tokens by what else is in the batch, and the answers of"
            " requests would depend on each other: set model.moe.capacity to None, or generate with"
            " jaxmoe.generate"
        )
    if feed_forward.is_routed and not feed_forward.router.traits.is_pointwise:
        raise ValueError(
            f"model.moe.router {feed_forward.router.name!r} chooses by what else is in the batch,"
            " and the answers of requests would depend on each other: generate with"
            " jaxmoe.generate, or serve a model with another router, such as softmax_topk"
        )
