# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Allocates the pages of keys and values on devices, and refuses models that pages cannot serve.

A step computes tokens of several sequences side by side. What a token computes may therefore depend
on the tokens before it through attention alone, and keys and values must not change later.
"""

from __future__ import annotations

from typing import Any

from jaxmoe.execution import ExecutionConfig, ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.device.step import Pools

_SERVED_AXES = ("tensor", "expert")


def initial_pools(model: ModelConfig, execution: ServedConfig, *, pages: int, size: int) -> Pools:
    """Return empty pages for all layers, cut as the mesh is.

    Args:
        model: Layers.
        execution: Precision and placement.
        pages: Number of pages.
        size: Positions of a page.
    """
    pools: Pools = {}
    for stack in model.stacks:
        mixer: Any = stack.kind.mixer  # recurrent ones have been refused
        sizes = {"layers": stack.num_calls, "pages": pages, "size": size}
        pools[stack.path] = mixer.initial_pages(execution, **sizes)
    return pools


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


def why_not_served(model: ModelConfig, execution: ExecutionConfig, mesh: Any) -> str | None:
    """Return why a model cannot be served, with the field and the way out; None if it can.

    Its tokens are computed side by side with those of other requests, and must not depend on them.

    Args:
        model: Config of the model.
        execution: How it is computed.
        mesh: Mesh of the instance; None for one device.
    """
    if not model.attention.is_causal:
        return (
            "model.attention.is_causal=False: this model fills gaps from both sides, and requests"
            " are answered from left to right: serve it with jaxmoe.contrib.diffusion, or sample it"
            " with jaxmoe.contrib.diffusion.diffuse"
        )
    if execution.cache_reading.selects:
        return (
            "reading:pages selects pages of the cache of one sequence, and a server shares them:"
            " generate one prompt with it, or leave it out"
        )
    sizes = {} if mesh is None else dict(mesh.shape)
    for name, size in sizes.items():
        if size > 1 and name not in _SERVED_AXES:
            return (
                f"execution.mesh.{name}={size}: an instance serves one row of tokens, which only"
                " the axes tensor and expert share: set it to 1"
            )
    reasons = (_why_not(kind.mixer, kind.feed_forward) for kind in model.kinds)
    return next((reason for reason in reasons if reason is not None), None)


def _why_not(mixer: Any, feed_forward: Any) -> str | None:
    """Return why a layer cannot be served; None if it can."""
    if not mixer.has_pages:
        return (
            f"model.layers has the mixer {mixer.name!r}, which keeps no keys and values in pages:"
            " generate with jaxmoe.generate, or serve a model with the attention grouped_query or"
            " latent"
        )
    if feed_forward.keeps_order:
        return (
            "model.moe.capacity drops tokens by what else is in the batch, and the answers of"
            " requests would depend on each other: set model.moe.capacity to None, or generate with"
            " jaxmoe.generate"
        )
    if feed_forward.is_routed and not feed_forward.router.traits.is_pointwise:
        return (
            f"model.moe.router {feed_forward.router.name!r} chooses by what else is in the batch,"
            " and the answers of requests would depend on each other: generate with"
            " jaxmoe.generate, or serve a model with another router, such as softmax_topk"
        )
    return None
