# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Models computed as a chain of programs: bitwise the whole model, by layers and by halves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.depth.hyper_connections import HyperResidualConfig
from jaxmoe.contrib.depth.loop import LoopConfig
from jaxmoe.contrib.depth.parallel_streams import ParallelStreamsConfig
from jaxmoe.contrib.layerwise.chain import Chain
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards import DenseConfig
from jaxmoe.layers.mixers import Mamba2Config
from jaxmoe.models.config import LayerConfig
from jaxmoe.models.transformer import forward
from tests.jaxmoe.layers.test_mesh_invariance import values_of
from tests.support.models import FULL, TINY, tokens_for

ONE = ExecutionConfig()
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_dim=6, chunk=4)
HYBRID = dataclasses.replace(
    TINY, num_layers=4, layers=(LayerConfig(mixer=MAMBA, feed_forward=DenseConfig()), LayerConfig())
)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
MODELS = {
    "uniform": TINY,
    "dense layer first": FULL,
    "hybrid": slow(HYBRID),
    "hyper-connections": slow(dataclasses.replace(TINY, residual=HyperResidualConfig(streams=2))),
    "loop": slow(
        dataclasses.replace(TINY, num_layers=3, loop=LoopConfig(first=1, last=2, times=2))
    ),
}


def by_halves(chain, call, stream, about):
    return chain.feed(call, chain.mix(call, stream, about), about)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_chain_is_bitwise_the_whole_model(model):
    params, (tokens, _) = values_of(model), tokens_for(model)
    segments = jnp.ones(tokens.shape, jnp.int32).at[:, 3:].set(2).at[:, -1].set(0)
    given = {"segment_ids": segments}
    wanted = jax.jit(lambda p: forward(model, ONE, p, tokens, **given).logits)(params)
    chain = Chain.of(model, ONE, params)
    for step in (Chain.call, by_halves):
        stream, about = chain.begin(tokens, segments)
        for call in chain.calls:
            stream = step(chain, call, stream, about)
        np.testing.assert_array_equal(chain.logits(stream), wanted, err_msg=str(step))
    last = chain.logits(stream, np.full(len(tokens), 4, np.int32))
    np.testing.assert_array_equal(last[:, 0], wanted[:, 4])


def test_several_streams_a_sequence_are_refused():
    model = dataclasses.replace(TINY, attention=ParallelStreamsConfig())
    with pytest.raises(ValueError, match="model.attention=parallel_streams: .* one stream"):
        Chain.of(model, ONE, {})
