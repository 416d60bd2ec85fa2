# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replays recorded experts: a token is computed by those that another pass has chosen for it.

    Batch.extra["experts"]  [B S L K]     experts of each token in each of the L MoE layers

A model that samples answers and the model that trains on them compute in different formats and
orders, and some tokens get other experts. In training on the recorded experts both compute the
same function. A replayed expert has the score that this router gives it, so the router learns.

An id is below E, the routed experts of a layer; E and above mark an empty slot. A token with a
negative id in a layer, or with empty slots alone, is free there: all its slots take the router's
own choice, because a part of another choice beside a part of one's own is the choice of neither.
Padding stays without experts.

Source: rollout routing replay, R3 (arXiv 2510.11370).
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmoe.routing.base import Arrays

EXPERTS: Final = "experts"
"""Name of the recorded experts in `Batch.extra`, and in the context of the layers."""
REPLAYED: Final = "replayed"
"""Statistic in `RouterStatistics.extra` [2]: assignments that were replayed, and those of them
that are among the router's own choice."""


def replay_experts(
    chosen: Int[Array, "T K"],
    recorded: Int[Array, "T K"],
    token_mask: Bool[Array, " T"],
    num_experts: int,
) -> tuple[Int[Array, "T K"], Arrays]:
    """Return the experts of each token: the recorded ones, where it has any.

    Args:
        chosen: The router's own choice; E marks an empty slot.
        recorded: Recorded experts, `RouterInputs.replayed`.
        token_mask: False for padding.
        num_experts: E.

    Returns:
        The experts, and the statistic REPLAYED.
    """
    recorded_ids = jnp.minimum(recorded, num_experts)
    is_expert = recorded_ids < num_experts
    is_given = (recorded_ids >= 0).all(-1) & is_expert.any(-1) & token_mask  # T
    is_counted = is_given[:, None] & is_expert
    is_own = (recorded_ids[:, :, None] == chosen[:, None, :]).any(axis=-1)
    sums = [jnp.sum(which, dtype=jnp.float32) for which in (is_counted, is_counted & is_own)]
    return jnp.where(is_given[:, None], recorded_ids, chosen), {REPLAYED: jnp.stack(sums)}


def why_not_recorded(model: Any) -> str | None:
    """Return why experts cannot be recorded for replay, with the way out; None if they can.

    Args:
        model: A `jaxmoe.models.config.ModelConfig`.
    """
    if model.moe is None or not model.num_moe_layers:
        return "a model without MoE layers has no experts to record: leave them out"
    if model.loop is not None:
        return (
            f"model.loop.times={model.loop.times} routes each token several times in a layer, and"
            " one choice is recorded: leave model.loop or the recorded experts out"
        )
    return None


def why_not_replayed(model: Any) -> str | None:
    """Return why a model cannot replay experts, with the field and the way out; None if it can.

    Args:
        model: A `jaxmoe.models.config.ModelConfig`.
    """
    reason = why_not_recorded(model)
    if reason is not None:
        return reason
    router = model.moe.router
    if not router.traits.can_replay:
        return (
            f"model.moe.router={router.name} cannot replay experts that were chosen elsewhere: take"
            " a router whose tokens choose the experts of highest score, such as softmax_topk, or"
            " leave the recorded experts out"
        )
    return None


def check_replayed(model: Any, experts: Any) -> None:
    """Refuse recorded experts that a model cannot replay.

    Args:
        model: A `jaxmoe.models.config.ModelConfig`.
        experts: `Batch.extra["experts"]`.

    Raises:
        ValueError: The router has none to replay, or the shape or dtype is another.
    """
    reason = why_not_replayed(model)
    if reason is not None:
        raise ValueError(f"batch.extra[{EXPERTS!r}]: {reason}")
    shape = (model.num_moe_layers, model.moe.top_k)
    if experts.shape[2:] != shape or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(
            f"batch.extra[{EXPERTS!r}] has dtype {experts.dtype} and shape {experts.shape}, which"
            f" must be integers [B, S, {shape[0]} MoE layers, {shape[1]} experts per token]"
        )
