# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers called one by one or in parallel, and what is measured of them, on planted models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.depth.hyper_connections import HyperResidualConfig
from jaxmoe.contrib.depth.loop import HyperloopConfig, LoopConfig
from jaxmoe.contrib.layerwise.chain import Chain, layer_calls
from jaxmoe.contrib.layerwise.depth import (
    describe_depth,
    map_error,
    measure_depth,
    streams_of,
)
from jaxmoe.contrib.layerwise.layer_parallel import parallel_scan, sweep_streams
from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.residual import LadderResidualConfig
from jaxmoe.models.transformer import forward
from sharding import MeshConfig
from tests.jaxmoe.layers.test_mesh_invariance import values_of
from tests.support.models import FULL, TINY, tokens_for
from tests.support.tolerances import assert_close

ONE = ExecutionConfig()
DENSE = dataclasses.replace(TINY, moe=None, dense_dim=24, num_layers=4)


def batch_of(model, length=6):
    tokens, targets = tokens_for(model, length=length)
    weights = jnp.ones(tokens.shape, jnp.float32)
    segments = jnp.ones(tokens.shape, jnp.int32).at[:, -1].set(0)  # padding is not counted
    return Batch(tokens=tokens, targets=targets, loss_weights=weights, segment_ids=segments)


@functools.cache
def planted():
    """A model whose last two layers write nothing."""
    params = dict(values_of(DENSE))
    layers = jax.tree.map(np.array, params["dense_blocks_0"])
    for module, name in (("attention", "o"), ("feed_forward", "down")):
        layers[module][name][2:] = 0.0
    params["dense_blocks_0"] = jax.tree.map(jnp.asarray, layers)
    return Chain.of(DENSE, ONE, params)


@functools.cache
def measured():
    return measure_depth(planted(), [batch_of(DENSE), batch_of(DENSE)])


LOOP = dataclasses.replace(DENSE, num_layers=3, loop=LoopConfig(first=1, last=2, times=2))
HYPER = dataclasses.replace(LOOP, residual=HyperResidualConfig(streams=2))
UNROLLED = {
    "loop": LOOP,
    "hyper": pytest.param(HYPER, marks=pytest.mark.slow),
    "full": pytest.param(FULL, marks=pytest.mark.slow),
}


@pytest.mark.parametrize("model", UNROLLED.values(), ids=UNROLLED)
def test_layers_called_one_by_one_equal_the_model(model):
    params, batch = values_of(model), batch_of(model)
    chain = Chain.of(model, ONE, params)
    stream, about = chain.begin(batch.tokens, batch.segment_ids)
    for call in layer_calls(model):
        stream = chain.call(call, stream, about)
    given = {"segment_ids": batch.segment_ids}
    wanted = jax.jit(lambda p: forward(model, ONE, p, batch.tokens, **given).logits)(params)
    assert_close(chain.logits(stream), wanted, "end_to_end")


def test_layers_that_write_nothing_contribute_nothing_and_can_be_skipped():
    found = measured()
    for values in (found.ratio, found.cosine, found.output):
        assert (abs(values[2:]) < 1e-6).all() and (abs(values[:2]) > 1e-3).all()
    assert found.later[0, 1] > 0.0 and found.later[0, 2] == found.later[0, 3] == 0.0
    assert np.isnan(found.later[1, 0]) and np.isnan(found.later[3]).all()
    assert found.num_tokens == 2 * 8 * 5, "without padding"
    assert found.free is not None and found.free[:2] == (2, 3) and found.free[2] < 1e-6
    assert describe_depth(found) == (
        "layers 2 to 3 each move the output by less than 2%, and together by 0.0%"
    )
    shown = dataclasses.replace(found, free=None, output=np.array([0.5, 0.04, 0.3, 0.2]))
    assert describe_depth(shown) == (
        "every layer moves the output by 2% or more: the least is layer 1 with 4.0%"
    )


def test_measures_of_the_first_layer_equal_the_formula():
    model, batch = planted(), batch_of(DENSE)
    stream, about = model.begin(batch.tokens, batch.segment_ids)
    first = model.call(layer_calls(DENSE)[0], stream, about)
    before, after = (np.asarray(s.x, np.float64)[:, :-1] for s in (stream, first))
    branch = after - before
    sizes = [np.linalg.norm(x, axis=-1) for x in (branch, before)]
    cosine = (branch * before).sum(-1) / (sizes[0] * sizes[1])
    np.testing.assert_allclose(measured().ratio[0], (sizes[0] / sizes[1]).mean(), rtol=1e-5)
    np.testing.assert_allclose(measured().cosine[0], cosine.mean(), rtol=1e-4)


def test_the_map_of_a_run_to_itself_is_best_on_the_diagonal():
    model = Chain.of(DENSE, ONE, values_of(DENSE))
    streams = streams_of(model, [batch_of(DENSE, length=16)])
    assert streams[0].shape == (8 * 15, DENSE.embed_dim)
    errors = map_error(streams, streams)
    assert errors.argmin(1).tolist() == errors.argmin(0).tolist() == [0, 1, 2, 3]
    assert errors.diagonal().max() < 1e-6 and errors[~np.eye(4, dtype=bool)].min() > 1e-3
    rng = np.random.default_rng(0)
    turned = [x @ rng.standard_normal((16, 20)).astype(np.float32) + 1.0 for x in streams]
    assert map_error(streams, turned).diagonal().max() < 1e-6, "another basis changes nothing"
    noise = [rng.standard_normal((120, 16)).astype(np.float32)]
    assert map_error(streams, noise).min() > 0.9, "what is not there is not predicted"
    with pytest.raises(ValueError, match="needs 64, and there are 40: raise batches"):
        map_error([x[:40] for x in streams], streams)


@pytest.mark.parametrize(
    "model", [DENSE, pytest.param(FULL, marks=pytest.mark.slow)], ids=["dense", "full"]
)
def test_sweeps_over_n_layers_are_exact_after_n_and_not_before(model):
    """FULL has a dense layer before the two MoE layers that are swept."""
    chain, batch = Chain.of(model, ONE, values_of(model)), batch_of(model)
    stream, about = chain.begin(batch.tokens, batch.segment_ids)
    calls = layer_calls(model)
    number = parallel_scan(model).length
    for call in calls[: len(calls) - number]:
        stream = chain.call(call, stream, about)
    first = stream.x
    for call in calls[-number:]:
        stream = chain.call(call, stream, about)
    ends = sweep_streams(chain, batch.tokens, batch.segment_ids, number)
    errors = [float(jnp.abs(end.x - stream.x).max() / jnp.abs(stream.x).max()) for end in ends]
    assert errors[-1] < 1e-5 and min(errors[:-1]) > 1e-3, errors
    once = first
    for call in calls[-number:]:
        own = chain.call(call, dataclasses.replace(stream, x=first), about)
        once = once + (own.x - first)
    assert_close(ends[0].x, once, "end_to_end")


def test_what_cannot_be_called_layer_by_layer_is_refused():
    loop = LoopConfig(first=0, last=1, connection=HyperloopConfig())
    rows = {
        "model.loop.connection": (dataclasses.replace(DENSE, loop=loop), ONE),
        "execution.mesh.stage=2": (DENSE, ExecutionConfig(mesh=MeshConfig(stage=2))),
    }
    for words, (model, execution) in rows.items():
        with pytest.raises(ValueError, match=words):
            Chain.of(model, execution, {})
    rows = {
        "model.residual=ladder": dataclasses.replace(DENSE, residual=LadderResidualConfig()),
        "model.loop": LOOP,
    }
    for words, model in rows.items():
        with pytest.raises(ValueError, match=words):
            parallel_scan(model)
