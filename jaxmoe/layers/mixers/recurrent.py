# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What mixers that carry a state share: documents of a row, convolution, state, gate, cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.layers.context import RecurrentMixer
from jaxmoe.layers.convolution import convolve
from jaxmoe.layers.mixers.cut_rows import inputs_before, state_before
from jaxmoe.layers.records import LayerCache, MixerOutputs, TokenInputs
from sharding import axes as ax
from sharding.constrain import Placement

Axes = tuple[str | None, ...]
"""Logical axes of an array."""

_TOKENS: Axes = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveMixer(RecurrentMixer):
    """Base class of the configs of Mamba and Mamba-2, which convolve what they write."""

    conv_length: int = 4
    """Positions that the convolution before the state reads, the own one included."""
    has_conv_bias: bool = True
    """Whether the convolution has a bias per channel."""
    has_projection_bias: bool = False
    """Whether the projections from and to the residual stream have biases."""


class ScanAxes(NamedTuple):
    """Logical axes of what the scan of a layer takes and returns."""

    projected: Mapping[str, Axes]
    """Axes of each projection of the stream."""
    weights: Mapping[str, Axes]
    """Axes of each other parameter."""
    output: Axes
    cache: Mapping[str, Axes]
    """Axes of each array of the layer in a cache."""


def scan_layer(
    scan: Callable[..., tuple[Array, dict[str, Array]]],
    projected: dict[str, Array],
    weights: dict[str, Array],
    tokens: TokenInputs,
    cache: LayerCache | None,
    placement: Placement,
    axes: ScanAxes,
) -> tuple[Array, MixerOutputs]:
    """Run the scan of a layer on the devices that have its heads or channels, and its rows.

    Args:
        scan: Function `(projected, weights, segments, layer_cache, parts=)` of one device's arrays,
            the document of each of its tokens (0 for padding), the arrays of the layer in the cache
            (none without one), and the mesh axes over which rows are cut. It returns the output and
            the new arrays of the cache.
        projected: Projections of the stream.
        weights: Other parameters.
        tokens: Inputs of all layers.
        cache: Cache of a stack of layers; None for none.
        placement: Layout of activations.
        axes: Logical axes.

    Returns:
        The output, and the outputs of the mixer with the new cache.

    Raises:
        ValueError: A cache is given for rows of several documents, or rows that are cut over
            devices have their tokens in another order.
    """
    segments = placement.place(_document_ids(tokens, cache), _TOKENS)
    layer_cache = _arrays_of_layer(cache)
    cache_axes = axes.cache if layer_cache else {}
    parts = _cut_axes(tokens, placement)

    def on_device(*arrays: Any, batch_axes: tuple[str, ...]) -> tuple[Array, dict[str, Array]]:
        del batch_axes
        return scan(*arrays, parts=parts)

    region = placement.region(
        on_device,
        in_axes=(axes.projected, axes.weights, _TOKENS, cache_axes),
        out_axes=(axes.output, cache_axes),
    )
    output, new = region(projected, weights, segments, layer_cache)
    return output, MixerOutputs(cache=_with_layer(cache, new))


def _document_ids(tokens: TokenInputs, cache: LayerCache | None) -> Int[Array, "B S"]:
    """Return the document of each token, 0 for padding.

    Args:
        tokens: Segments, or the mask of rows that are one document.
        cache: State that the first document continues, if it is given.

    Raises:
        ValueError: A cache is given for rows of several documents.
    """
    if tokens.segment_ids is None:
        return tokens.token_mask.astype(jnp.int32)
    if cache is not None:
        raise ValueError("a cache cannot hold packed segments")
    return tokens.segment_ids


def _cut_axes(tokens: TokenInputs, placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes over which rows are cut; empty where a device holds whole rows.

    Args:
        tokens: Inputs of all layers.
        placement: Layout of activations.

    Raises:
        ValueError: The tokens of a row are laid out in another order.
    """
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    axes = placement.mesh_axes(ax.ACT_SEQ_INNER)
    axes = tuple(axis for axis in axes if shape.get(axis, 1) > 1)
    if axes and tokens.order is not None:
        raise ValueError(
            "recurrent layers on rows cut over mesh.seq need the tokens in their order, and another"
            " was given: pass order=None"
        )
    return axes


def with_biases(projections: dict[str, Array], weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the projections of the stream with their biases.

    Args:
        projections: Arrays [B S ...] by name.
        weights: Parameters with `<name>_in_bias`.
    """
    return {
        name: part + weights[f"{name}_in_bias"].astype(part.dtype)[None, None]
        for name, part in projections.items()
    }


def convolve_silu(
    x: Float[Array, "B S ..."],
    taps: Array,
    bias: Array | None,
    before: Array | None,
    segments: Int[Array, "B S"],
    parts: tuple[str, ...],
) -> Float[Array, "B S ..."]:
    """Return silu of the convolution over the tokens of each document.

    Args:
        x: Inputs.
        taps: Weight of each position, the own one last.
        bias: Bias of each channel; None for none.
        before: Inputs of the last tokens before the row, from a cache; None for none.
        segments: Document of each token, 0 for padding.
        parts: Mesh axes over which rows are cut: inputs before then come from other devices.
    """
    if parts:
        before = inputs_before(x, segments, taps.shape[0] - 1, parts)
    return jax.nn.silu(convolve(x, taps, bias, segment_ids=segments, before=before))


def run_rows(
    run: Callable[..., tuple[Array, Array]],
    initial: Array | None,
    step: Float[Array, "B S n"],
    factor: Callable[[Array], Array],
    segments: Int[Array, "B S"],
    parts: tuple[str, ...],
) -> tuple[Array, Array]:
    """Return the outputs of a scan and the state after it.

    Args:
        run: Scan of this device's rows, with the argument `initial`.
        initial: State before the rows, from a cache; None for none.
        step: Lengths of the steps.
        factor: Function from the sum of a row's steps [B n] to the decay of a state over them.
        segments: Document of each token, 0 for padding.
        parts: Mesh axes over which rows are cut: the state before then comes from other devices.
    """
    if parts:
        time = jnp.sum(jnp.where(segments[..., None] != 0, step, 0.0), axis=1)
        initial = state_before(run()[1], factor(time), segments, parts)
    return run(initial=initial)


def gate_output(y: Array, x: Array, z: Array, skip: Array) -> Array:
    """Return (y + skip x) silu(z), f32; `skip` has the shape of a token."""
    y = y.astype(jnp.float32) + skip[None, None] * x.astype(jnp.float32)
    return y * jax.nn.silu(z.astype(jnp.float32))


def _arrays_of_layer(cache: LayerCache | None) -> dict[str, Array]:
    """Return the arrays of a layer in a cache that is a named tuple; none without a cache."""
    if cache is None:
        return {}
    return {name: part[cache.layer] for name, part in cache.entries._asdict().items()}


def _with_layer(cache: LayerCache | None, new: dict[str, Array]) -> Any:
    """Return `cache.entries` with the new arrays of the layer; None without a cache.

    Args:
        cache: Cache of a stack of layers.
        new: Arrays of the layer by their names in the cache.
    """
    if cache is None:
        return None
    parts = {
        name: part.at[cache.layer].set(new[name].astype(part.dtype))
        for name, part in cache.entries._asdict().items()
    }
    return type(cache.entries)(**parts)
