# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixes the predictions of models that were trained on parts of the data.

    p(y | x) = sum_k p(k | x) p_k(y | x),   p(k | x) = softmax(-|e - c_k|^2 / T)

with e the features of the text so far and c_k the centroids of the parts (`clusters.py`). Only
the likeliest models of each token are used, one or two. Everything is in logarithms, in float64 on
the host; a model contributes the loss of each target, not its logits.

Gururangan et al., "Scaling expert language models with unsupervised domain discovery" (arXiv
2303.14177), section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.contrib.ensembles.clusters import prefix_features, squared_distances
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig, WholeRowsConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import forward
from jaxmoe.training.cross_entropy import token_nll
from pallas_kernels.array_types import Float


def make_token_nll(
    model: ModelConfig, execution: ExecutionConfig
) -> Callable[[Any, Any, Batch], Array]:
    """Return a jitted function (params, router_state, batch) -> nll of each target [B S], nats.

    Args:
        model: Causal model.
        execution: How it is computed; its mesh must be current in every call.
    """
    execution = WholeRowsConfig.of(execution)

    def run(params: Any, router_state: Any, batch: Batch) -> Array:
        output = forward(
            model,
            execution,
            params,
            jnp.asarray(batch.tokens),
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            router_state=router_state,
        )
        assert output.logits is not None  # asked for by default
        logits = execution.placement.place(output.logits.astype(jnp.float32), (None, None, None))
        return token_nll(logits, jnp.asarray(batch.targets))

    return jax.jit(run)


def part_distances(
    batch: Batch, centroids: Float[np.ndarray, "K d"]
) -> tuple[Float[np.ndarray, "B S K"], np.ndarray]:
    """Return the squared distance of each prefix to each centroid, and which prefixes are empty.

    Prefix s of a row is what target s is predicted from: its document's tokens up to s.

    Args:
        batch: Rows on the host.
        centroids: Centroids of the parts.

    Returns:
        Distances [B S K], and True [B S] where no n-gram is counted.
    """
    distances = []
    is_empty = []
    for row, tokens in enumerate(np.asarray(batch.tokens)):
        segments = None if batch.segment_ids is None else np.asarray(batch.segment_ids[row])
        features = prefix_features(tokens, segments)
        distances.append(squared_distances(features, centroids))
        is_empty.append(~features.any(axis=-1))
    return np.stack(distances), np.stack(is_empty)


def part_log_probs(
    distances: Float[np.ndarray, "*batch K"], is_empty: np.ndarray, temperature: float
) -> Float[np.ndarray, "*batch K"]:
    """Return log p(k | prefix); uniform where the prefix is empty.

    Args:
        distances: Squared distances to the centroids.
        is_empty: Whether a prefix has no n-gram.
        temperature: T, above 0.
    """
    scores = np.where(is_empty[..., None], 0.0, -distances / temperature)
    return scores - _logsumexp(scores)[..., None]


def member_log_weights(
    log_probs: Float[np.ndarray, "*batch K"], parts: Sequence[int], top: int
) -> Float[np.ndarray, "*batch R"]:
    """Return the logarithms of the weights of the members, which sum to 1.

    Args:
        log_probs: log p(k | prefix) of every part.
        parts: Part of each member. Members of one part share its probability; parts without a
            member give theirs to the others.
        top: Members that are used per token, the likeliest; the others have -inf.
    """
    sizes = np.array([parts.count(part) for part in parts], float)
    scores = log_probs[..., list(parts)] - np.log(sizes)
    order = np.argsort(-scores, axis=-1, kind="stable")
    is_used = np.zeros(scores.shape, bool)
    np.put_along_axis(is_used, order[..., :top], True, axis=-1)
    scores = np.where(is_used, scores, -np.inf)
    return scores - _logsumexp(scores)[..., None]


def ensemble_nll(
    nll: Float[np.ndarray, "*batch R"], log_weights: Float[np.ndarray, "*batch R"]
) -> Float[np.ndarray, "*batch"]:
    """Return the nll of each target under the mixture, in nats.

    Args:
        nll: Nll of each target under each member.
        log_weights: Logarithms of the weights of the members.
    """
    return -_logsumexp(log_weights - nll)


def _logsumexp(values: np.ndarray) -> np.ndarray:
    """Return the logarithm of the sum of exponentials over the last axis; one is finite."""
    largest = values.max(axis=-1)
    return largest + np.log(np.exp(values - largest[..., None]).sum(axis=-1))
