# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that micro-batches leave out: against models without them; refusals; balancers."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.adapters.remix import RemixConfig
from jaxmoe.contrib.depth.skipping import PartialBackprop, SkippingConfig
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.routing import BALANCERS, RouterStatistics
from jaxmoe.routing.balancers import LoadBalanceConfig, RouterZConfig
from jaxmoe.training.estimators import BackpropConfig
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import Step, make_train_step
from sharding import MeshConfig
from sharding.pipeline import InterleavedConfig
from tests.support import one_step
from tests.support.models import BATCH, LENGTH, TINY
from tests.support.tolerances import assert_close

BALANCED = (LoadBalanceConfig(scope="micro_batch", coefficient=0.5), RouterZConfig())
TWO = dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, balancers=BALANCED))
"""Two MoE layers whose balance losses are means over micro-batches."""
ONE = dataclasses.replace(TWO, num_layers=1)
HALF = SkippingConfig(groups=2, ratio=0.5)


def _batch(rows):
    tokens = np.random.default_rng(0).integers(0, TWO.vocab_size, (BATCH, LENGTH)).astype(np.int32)
    weights = np.ones((BATCH, LENGTH), np.float32)
    return jax.tree.map(
        lambda array: array[rows], Batch(tokens=tokens, targets=tokens, loss_weights=weights)
    )


def _with_layer(params, layer):
    """Parameters with one layer alone."""
    layers = jax.tree.map(lambda leaf: leaf[layer : layer + 1], params["moe_blocks_0"])
    return params | {"moe_blocks_0": layers}


def _state(params, model):
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=jax.tree.map(jnp.array, params),
        opt_state=one_step.SGD.init(params),
        router_state=initial_router_state(model),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


def _balanced(model, scope, factor=1.0):
    """The model with a scope of its balance loss, and multiples of the losses of its balancers."""
    load, z = model.moe.balancers
    load = dataclasses.replace(load, scope=scope)
    balancers = tuple(
        dataclasses.replace(balancer, coefficient=factor * balancer.coefficient)
        for balancer in (load, z)
    )
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, balancers=balancers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "form", "factor"), [("micro_batch", "buffer", 1.0), ("global", "two_pass", 2.0)]
)
def test_a_step_is_the_mean_of_those_of_models_without_the_layers(scope, form, factor):
    """Micro-batch 0 leaves out layer 0, and micro-batch 1 layer 1.

    The loss of the whole batch has the sum of the layers; that of micro-batches, their mean.
    """
    params = one_step.params_of(TWO)
    assert HALF.paths(2) == ((1,), (0,))
    found = one_step.step_once(
        _balanced(TWO, scope), _batch(slice(None)), parts=2, form=form, skipping=HALF
    )
    step = make_train_step(_balanced(ONE, scope, factor), one_step.SGD, clip=None)
    losses, balance, gradients, loads = [], [], [], []
    for micro, layer in ((0, 1), (1, 0)):
        before = _with_layer(params, layer)
        state, metrics = step(_state(before, ONE), _batch(slice(micro, None, 2)))
        change = jax.tree.map(lambda old, new: np.asarray(old - new) / 2, before, state.params)
        of_layers = change.pop("moe_blocks_0")
        losses.append(metrics.loss)
        balance.append(metrics.losses)
        gradients.append((change, of_layers))
        loads.append(metrics.load)
    (first, layer_1), (second, layer_0) = gradients
    wanted = jax.tree.map(np.add, first, second)
    wanted["moe_blocks_0"] = jax.tree.map(lambda *x: np.concatenate(x), layer_0, layer_1)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(found["loss"], np.mean(losses))
    for name, value in found["losses"].items():
        close(value, np.mean([one[name] for one in balance]))
    close(found["load"], np.concatenate(loads[::-1]))
    assert_close(found["gradient"], wanted, "end_to_end")


SWAPPED = SkippingConfig(groups=4, ratio=0.0, order="swapped_ends")
EXCHANGED = np.asarray([1, 0, 3, 2])


@pytest.mark.slow
def test_a_step_with_swapped_ends_is_the_mean_of_those_of_models_with_exchanged_layers():
    """The second of two micro-batches passes through layers 1, 0, 3 and 2 of four stages."""
    model = dataclasses.replace(TWO, num_layers=4)
    params, execution = one_step.params_of(model), ExecutionConfig(mesh=MeshConfig(stage=4))
    assert SWAPPED.paths(2) == ((0, 1, 2, 3), tuple(EXCHANGED.tolist()))
    found = one_step.step_once(
        model, _batch(slice(None)), parts=2, execution=execution, skipping=SWAPPED
    )
    step = make_train_step(model, one_step.SGD, clip=None)
    losses, balance, gradients, loads = [], [], [], []
    for micro, order in ((0, np.arange(4)), (1, EXCHANGED)):
        layers = jax.tree.map(lambda leaf, order=order: leaf[order], params["moe_blocks_0"])
        before = params | {"moe_blocks_0": layers}
        state, metrics = step(_state(before, model), _batch(slice(micro, None, 2)))
        change = jax.tree.map(lambda old, new: np.asarray(old - new) / 2, before, state.params)
        # The exchange is its own inverse.
        back = jax.tree.map(lambda leaf, order=order: leaf[order], change["moe_blocks_0"])
        losses.append(metrics.loss)
        balance.append(metrics.losses)
        gradients.append(change | {"moe_blocks_0": back})
        loads.append(np.asarray(metrics.load)[order])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(found["loss"], np.mean(losses))
    for name, value in found["losses"].items():
        close(value, np.mean([one[name] for one in balance]))
    close(found["load"], np.mean(loads, axis=0))
    assert_close(found["gradient"], jax.tree.map(np.add, *gradients), "end_to_end")
    plain = one_step.step_once(model, _batch(slice(None)), parts=2)
    assert abs(plain["loss"] - found["loss"]) > 1e-4, "the order matters"


def test_a_ratio_that_leaves_out_nothing_is_the_ordinary_step():
    none = SkippingConfig(groups=2, ratio=0.1)
    assert none.num_left_out == 0
    assert none.paths(2) is None
    dense = dataclasses.replace(TINY, moe=None, dense_dim=8)
    given = _state(one_step.params_of(dense), dense), _batch(slice(None))
    texts = [
        make_train_step(dense, one_step.SGD, accumulation=2, gradients=gradients)
        .lower(*given)
        .as_text()
        for gradients in (PartialBackprop(skipping=none), None)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "name", [name for name, balancer in BALANCERS.items() if balancer.reads == "statistics"]
)
def test_balance_losses_of_no_tokens_are_zero_without_a_gradient(name):
    """Those of a layer that is left out."""
    balancer = BALANCERS[name]()
    zeros = {key: jnp.zeros((2, 4)) for key in ("counts", "kept", "prob_sum")}
    sums = {key: jnp.zeros(2) for key in ("num_tokens", "z_sum", "entropy_sum")}
    by_expert = ("importance", "smooth_load", "sharp_prob_sum")
    extra = {key: jnp.zeros((2, 4)) for key in by_expert}
    extra |= {key: jnp.zeros(2) for key in ("top_prob_sum", "row_balance_sum", "num_rows")}
    statistics = RouterStatistics(**zeros, **sums, extra=extra)
    value, slope = jax.value_and_grad(balancer.loss)(statistics)
    assert value == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio": 0.0}, "training.skipping.ratio=0.0 must be above 0 and at most 0.5"),
        ({"ratio": 0.6}, "training.skipping.ratio=0.6 must be above 0 and at most 0.5"),
        (
            {"groups": 2, "ratio": 0.0, "order": "swapped_ends"},
            "training.skipping.groups=2 must be at least 4 with"
            " training.skipping.order=swapped_ends, which exchanges the first two groups and the"
            " last two",
        ),
        ({"groups": 1}, "training.skipping.groups=1 must be at least 2"),
        (
            {"never": (4,)},
            "training.skipping.never=(4,) has the group 4, and numbers of"
            " training.skipping.groups=4 must be at least 0 and at most 3",
        ),
        (
            {"ratio": 0.5, "never": (0,)},
            "training.skipping.ratio=0.5 leaves out 2 of training.skipping.groups=4, and at most 1"
            " of the 3 that are not in training.skipping.never=(0,) may be left out, no two"
            " neighbours at once: choose a smaller ratio, or fewer groups in never",
        ),
    ],
)
def test_configs_without_paths_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SkippingConfig(**fields)


FOUR = dataclasses.replace(TINY, num_layers=4)
STAGES = {"mesh": MeshConfig(stage=4)}


def _step(execution, accumulation, form="buffer", model=FOUR, skipping=None):
    return Step(
        model=model,
        optimizer=optax.identity(),
        execution=execution,
        accumulation=accumulation,
        accumulated_balance=form,
        gradients=BackpropConfig() if skipping is None else PartialBackprop(skipping=skipping),
    )


@pytest.mark.parametrize(
    ("skipping", "given", "accumulation", "form", "message"),
    [
        (
            SkippingConfig(),
            {},
            1,
            "buffer",
            "training.skipping leaves out other layers in each micro-batch, and"
            " training.accumulation=1 has one: set training.accumulation to 2 or more",
        ),
        (
            SkippingConfig(groups=3),
            {},
            4,
            "buffer",
            "training.skipping.groups=3 must divide the 4 equal layers of moe_blocks_0",
        ),
        (
            SkippingConfig(groups=2, ratio=0.5),
            STAGES,
            4,
            "buffer",
            "training.skipping.groups=2 must be execution.mesh.stage=4 times"
            " execution.pipeline.chunks, the parts through which micro-batches pass: set"
            " training.skipping.groups to that product, or other stages or chunks",
        ),
    ],
    ids=["one micro-batch", "layers", "stages"],
)
def test_steps_that_cannot_skip_are_refused(skipping, given, accumulation, form, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _step(ExecutionConfig(**given), accumulation, form, skipping=skipping)


def test_an_adapter_of_several_draws_is_refused():
    model = dataclasses.replace(FOUR, adapter=RemixConfig())
    message = (
        "^model.adapter:remix trains a router by the losses of several draws, and training.skipping"
    )
    with pytest.raises(ValueError, match=message):
        _step(ExecutionConfig(), 4, model=model, skipping=SkippingConfig())


def test_chunks_on_stages_are_accepted():
    pipeline = {"mesh": MeshConfig(stage=2), "pipeline": InterleavedConfig(chunks=2)}
    SkippingConfig().check(_step(ExecutionConfig(**pipeline), 4))
    # Without balance losses of the whole batch both forms are the same.
    dense = dataclasses.replace(FOUR, moe=None)
    SkippingConfig().check(_step(ExecutionConfig(), 4, "two_pass", model=dense))
