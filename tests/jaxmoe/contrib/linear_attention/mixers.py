# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The mixers under test, small, with parameters of which none has the value of a fresh layer."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.linear_attention.gated_delta import GatedDeltaConfig
from jaxmoe.contrib.linear_attention.kimi_delta import KimiDeltaConfig
from jaxmoe.contrib.linear_attention.lightning import LightningConfig
from jaxmoe.contrib.linear_attention.rotary_lightning import RotaryLightningConfig
from jaxmoe.contrib.linear_attention.short_convolution import ShortConvolutionConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import LayerContext, RecurrentMixer
from jaxmoe.layers.records import TokenInputs

WIDTH, BATCH, LENGTH = 24, 2, 21
MIXERS: Mapping[str, RecurrentMixer] = {
    "short_convolution": ShortConvolutionConfig(
        num_channels=20, has_conv_bias=True, has_projection_bias=True
    ),
    "gated_delta": GatedDeltaConfig(num_heads=6, num_key_heads=3, head_dim=5, key_dim=7, chunk=8),
    "kimi_delta": KimiDeltaConfig(
        num_heads=4, num_key_heads=2, head_dim=5, key_dim=7, gate_rank=3, chunk=8
    ),
    "bounded_delta": KimiDeltaConfig(
        num_heads=4,
        num_key_heads=2,
        head_dim=5,
        key_dim=7,
        gate_rank=None,
        decay_floor=-3.0,
        chunk=8,
    ),
    "lightning": LightningConfig(num_heads=3, head_dim=5, chunk=8),
    "rotary_lightning": RotaryLightningConfig(
        num_heads=6, head_dim=5, rotary_dim=4, rope_theta=40.0, norm_groups=2, chunk=8
    ),
}
CONTEXT = LayerContext(embed_dim=WIDTH, norm_epsilon=1e-5)
every_mixer = pytest.mark.parametrize("name", MIXERS)


def inputs():
    return jnp.asarray(
        np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)), jnp.float32
    )


def segments_of():
    """Three documents in the first row; padding behind the only one of the second."""
    segments = np.ones((BATCH, LENGTH), np.int32)
    segments[0, 9:] = 2
    segments[0, 13:] = 3
    segments[1, 17:] = 0
    return segments


def module_of(config):
    return config.build(CONTEXT, ExecutionConfig())


@functools.cache
def params_of(config):
    tokens = TokenInputs(token_mask=jnp.ones((BATCH, LENGTH), bool))
    init = functools.partial(module_of(config).init, jax.random.key(0))
    boxes = jax.eval_shape(init, inputs(), tokens, None)["params"]
    rng = np.random.default_rng(1)
    params = {}
    for name, box in boxes.items():
        scale = 0.3 if len(box.value.shape) > 1 else 0.5
        params[name] = scale * rng.standard_normal(box.value.shape).astype(np.float32)
    return {name: jnp.asarray(values) for name, values in params.items()}


def mix(config, params, x, segments):
    tokens = TokenInputs(token_mask=segments != 0, segment_ids=segments)
    return module_of(config).apply({"params": params}, x, tokens, None)[0]


@functools.cache
def mixer(name):
    """Return a jitted function of inputs and segments."""
    config = MIXERS[name]
    params = params_of(config)
    return jax.jit(lambda x, segments: mix(config, params, x, segments))
