# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what every layer of a trained model contributes, on held-out tokens.

With the stream h_l after layer l and its branch b_l = h_l - h_{l-1}:

    ratio     mean over tokens of |b_l| / |h_{l-1}|
    cosine    mean cosine of b_l and h_{l-1}; below 0 a layer removes what is in the stream
    later     without layer l: sum over tokens of |b'_m - b_m| over that of |b_m|, for each m > l
    output    without layer l: mean total variation distance of the predictions of the next token

`map_error` compares the streams of two models on the same tokens: the ridge regression from layer l
of the one to layer m of the other is fitted on half of the tokens, and its error on the others is
relative to their variance. A deeper model that spreads the same computation over more layers has
its smallest errors on the diagonal of relative depths (arXiv 2505.13898, sections 3 and 4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmoe.contrib.layerwise.chain import Chain, layer_calls
from jaxmoe.data import Batch
from sharding.constrain import place_like

FREE: Final = 0.02
"""Distance of the predictions below which a layer is reported as one that moves little."""
RIDGE: Final = 1e-6
"""Penalty of the regression, relative to the mean square of its inputs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DepthMeasures:
    """Measures of the layers that a token passes through, in order."""

    layers: tuple[str, ...]
    """Number of each layer, with the turn in a loop."""
    kinds: tuple[str, ...]
    """Mixer and feed-forward of each."""
    ratio: np.ndarray
    cosine: np.ndarray
    output: np.ndarray
    """One number for each layer [n]."""
    later: np.ndarray
    """Effect of the layer of the row on that of the column [n n]; NaN where it is not later."""
    free: tuple[int, int, float] | None
    """First and last place of the longest run of layers that each move the output by less than
    FREE, and the distance without all of them; None if there is none."""
    num_tokens: int


def measure_depth(model: Chain, batches: Sequence[Batch]) -> DepthMeasures:
    """Return the measures of all layers.

    Args:
        model: Trained model.
        batches: Held-out batches.
    """
    calls = layer_calls(model.model)
    sums = None
    for batch in batches:
        measures = _measure_batch(model, batch)
        sums = measures if sums is None else jax.tree.map(np.add, sums, measures)
    assert sums is not None  # a run has held-out batches
    number = sums["tokens"]
    with np.errstate(invalid="ignore", divide="ignore"):
        later = np.where(sums["moved"] == 0.0, 0.0, sums["moved"] / sums["size"])
    places = np.arange(len(calls))
    output = sums["output"] / number
    return DepthMeasures(
        layers=tuple(
            f"{c.layer}" + (f" turn {c.turn}" if c.stack.turns > 1 else "") for c in calls
        ),
        kinds=tuple(call.kind for call in calls),
        ratio=sums["ratio"] / number,
        cosine=sums["cosine"] / number,
        output=output,
        later=np.where(places[:, None] < places, later, np.nan),
        free=_free(model, batches, output),
        num_tokens=int(number),
    )


def streams_of(model: Chain, batches: Iterable[Batch]) -> list[np.ndarray]:
    """Return the stream after each layer [T D] in f32, of the real tokens.

    Args:
        model: Trained model.
        batches: Held-out batches.
    """
    parts: list[list[np.ndarray]] = []
    for batch in batches:
        stream, inputs = model.begin(batch.tokens, batch.segment_ids)
        is_real = np.asarray(inputs.token_mask)
        streams = []
        for call in layer_calls(model.model):
            stream = model.call(call, stream, inputs)
            streams.append(np.asarray(model.hidden(stream), np.float32)[is_real])
        parts.append(streams)
    return [np.concatenate(of_layer) for of_layer in zip(*parts, strict=True)]


def map_error(sources: Sequence[np.ndarray], target_streams: Sequence[np.ndarray]) -> np.ndarray:
    """Return the relative error of linear maps from each layer of one model to each of another.

    Args:
        sources: Streams [T D] after each layer of the first model.
        target_streams: Streams [T D'] after each layer of the second, of the same tokens.

    Returns:
        Array [layers of the first, layers of the second]; 0 is a perfect map, 1 the mean.

    Raises:
        ValueError: There are too few tokens for the width of the first model.
    """
    tokens, width = sources[0].shape
    half = tokens // 2
    if half < 2 * width:
        raise ValueError(
            f"a linear map from width {width} is fitted on half of the tokens and needs"
            f" {4 * width}, and there are {tokens}: raise batches"
        )
    targets = [x.astype(np.float64) for x in target_streams]
    targets = [x - x[:half].mean(0) for x in targets]
    joined = np.concatenate(targets, axis=1)
    ends = np.cumsum([x.shape[1] for x in targets])[:-1]
    errors = np.zeros((len(sources), len(target_streams)))
    for place, raw in enumerate(sources):
        x = raw.astype(np.float64)
        x = x - x[:half].mean(0)
        fitted = x[:half]
        held_out = x[half:]
        gram = fitted.T @ fitted
        gram += RIDGE * np.trace(gram) / width * np.eye(width)
        wrong = joined[half:] - held_out @ np.linalg.solve(gram, fitted.T @ joined[:half])
        for column, part in enumerate(np.split(wrong, ends, axis=1)):
            errors[place, column] = np.square(part).sum() / np.square(targets[column][half:]).sum()
    return errors


def describe_depth(measures: DepthMeasures) -> str:
    """Return one sentence about the layers that move the output least."""
    if measures.free is None:
        least = int(measures.output.argmin())
        return (
            f"every layer moves the output by {FREE:.0%} or more: the least is layer"
            f" {measures.layers[least]} with {measures.output[least]:.1%}"
        )
    first, last, together = measures.free
    if first == last:
        return f"layer {measures.layers[first]} moves the output by less than {FREE:.0%}"
    return (
        f"layers {measures.layers[first]} to {measures.layers[last]} each move the output by less"
        f" than {FREE:.0%}, and together by {together:.1%}"
    )


def _measure_batch(model: Chain, batch: Batch) -> dict[str, Any]:
    """Return the sums over the tokens of one batch."""
    calls = layer_calls(model.model)
    stream, inputs = model.begin(batch.tokens, batch.segment_ids)
    streams = [stream]
    number = len(calls)
    for call in calls:
        streams.append(model.call(call, streams[-1], inputs))
    states = [model.hidden(stream) for stream in streams]
    predicted = model.logits(streams[-1])
    mask = inputs.token_mask
    moved = np.zeros((number, number))
    size = np.ones((number, number))
    per_layer: list[Any] = [
        _contribution(*pair, mask) for pair in zip(states, states[1:], strict=False)
    ]
    output = []
    for left_out in range(number):
        stream = streams[left_out]
        before = states[left_out]
        for later in range(left_out + 1, number):
            stream = model.call(calls[later], stream, inputs)
            after = model.hidden(stream)
            arguments = (before, after, states[later], states[later + 1], mask)
            moved[left_out, later], size[left_out, later] = jax.device_get(_change(*arguments))
            before = after
        output.append(_distance(model.logits(stream), predicted, mask))
    ratio, cosine = np.asarray(jax.device_get(per_layer), np.float64).T
    return {
        "ratio": ratio,
        "cosine": cosine,
        "output": np.asarray(jax.device_get(output), np.float64),
        "moved": moved,
        "size": size,
        "tokens": np.float64(jnp.sum(mask)),
    }


def _free(
    model: Chain, batches: Sequence[Batch], output: np.ndarray
) -> tuple[int, int, float] | None:
    """Return the longest run of layers that move little, and their distance together."""
    best = (0, 0)
    start = 0
    for place, distance in enumerate([*output, np.inf]):
        if distance >= FREE:
            best = max(best, (start, place), key=lambda run: run[1] - run[0])
            start = place + 1
    first, end = best
    if first == end:
        return None
    total = number = 0.0
    for batch in batches:
        stream, inputs = model.begin(batch.tokens, batch.segment_ids)
        without = stream
        for place, call in enumerate(layer_calls(model.model)):
            stream = model.call(call, stream, inputs)
            if not first <= place < end:
                without = model.call(call, without, inputs)
        arguments = model.logits(without), model.logits(stream), inputs.token_mask
        total += float(_distance(*arguments))
        number += float(jnp.sum(inputs.token_mask))
    return first, end - 1, total / number


@jax.jit
def _contribution(
    before: Float[Array, "B S D"], after: Float[Array, "B S D"], mask: Bool[Array, "B S"]
) -> tuple[Array, Array]:
    """Return the sums over tokens of the ratio and of the cosine of a branch."""
    before, branch = before.astype(jnp.float32), _branch(before, after)
    of_branch = _norm(branch)
    of_stream = _norm(before)
    ratio = of_branch / jnp.maximum(of_stream, 1e-30)
    cosine = jnp.sum(branch * before, axis=-1) / jnp.maximum(of_branch * of_stream, 1e-30)
    return _masked_sum(ratio, mask), _masked_sum(cosine, mask)


@jax.jit
def _change(
    before: Array, after: Array, usual_before: Array, usual_after: Array, mask: Array
) -> tuple[Array, Array]:
    """Return the sums over tokens of |b' - b| and of |b| of a layer."""
    baseline = _branch(usual_before, usual_after)
    moved = _norm(_branch(before, after) - baseline)
    return _masked_sum(moved, mask), _masked_sum(_norm(baseline), mask)


@jax.jit
def _distance(logits: Array, reference: Array, mask: Array) -> Array:
    """Return the sum over tokens of the total variation distance of two predictions."""
    difference = jax.nn.softmax(logits, axis=-1) - jax.nn.softmax(reference, axis=-1)
    return _masked_sum(0.5 * jnp.sum(jnp.abs(difference), axis=-1), mask)


def _branch(before: Array, after: Array) -> Array:
    return after.astype(jnp.float32) - before.astype(jnp.float32)


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x * x, axis=-1))


def _masked_sum(x: Array, mask: Array) -> Array:
    return jnp.sum(x * place_like(mask, x).astype(x.dtype))
