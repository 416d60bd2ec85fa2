# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled steps: no copy of the pages, a few programs, and models that are refused."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig, KernelsConfig
from jaxmoe.layers.mixers import MambaConfig, SharedKeysConfig
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.models.transformer import forward
from jaxmoe.routing import CapacityConfig, UniformRandomConfig
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.device.layers import apart, stack_layers
from jaxmoe.serve.device.pages import page_bytes, why_not_served
from jaxmoe.serve.device.transfers import make_transfers
from jaxmoe.serve.requests import Sampling
from jaxmoe.serve.step import EngineStep, Work
from sharding import MeshConfig, make_mesh
from tests.support.serving import MODEL, SIZES, executor, params, serve


def test_programs_are_compiled_at_the_start_and_copy_no_pages_and_no_experts():
    """Temporaries of a step do not grow with the pool, nor with the experts of a layer."""
    found = executor()
    assert [(shape.pieces, shape.context_length) for shape in found.programs] == [
        ((0, 0), 32),
        ((2, 5), 32),
    ]
    size = SIZES.num_pages * page_bytes(MODEL, found.execution, SIZES.page_size)
    assert found.pool_bytes == size
    big = ExecutorConfig(num_pages=4096, page_size=16, shapes=SIZES.shapes, context_lengths=(32,))
    assert MODEL.moe is not None
    moe = dataclasses.replace(MODEL.moe, expert_dim=256)
    wide = dataclasses.replace(MODEL, embed_dim=128, dense_layers=(), moe=moe)
    larger = ModelExecutor(wide, params(wide), config=big)
    stack = params(wide)["moe_blocks_0"]["moe"]["experts"]
    experts = sum(leaf.nbytes for leaf in jax.tree.leaves(stack)) / wide.num_layers
    for shape in larger.programs:
        assert larger.temp_bytes(shape) < min(larger.pool_bytes / 10, experts / 2)


def test_weights_of_layers_apart_are_the_stacked_ones():
    held = apart(MODEL, params())
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, apart(MODEL, held), held))
    host = jax.device_get(params())
    views = apart(MODEL, host)
    chex.assert_trees_all_equal(views, held)
    own = jax.tree.leaves(host[MODEL.scans[0].name])[0]
    assert np.shares_memory(own, jax.tree.leaves(views[MODEL.scans[0].name][0])[0])
    assert [len(held[scan.name]) for scan in MODEL.scans] == [scan.length for scan in MODEL.scans]
    again = stack_layers(held)
    assert jax.tree.structure(again) == jax.tree.structure(params())
    jax.tree.map(np.testing.assert_array_equal, again, params())
    with pytest.raises(ValueError, match="layers_apart=-1 must be 0"):
        ExecutorConfig(layers_apart=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": dataclasses.replace(MODEL.attention, is_causal=False)}, "is_causal=False"),
        ({"attention": SharedKeysConfig()}, "mixer 'shared_keys'"),
        ({"attention": MambaConfig()}, "mixer 'mamba'"),
        (
            {"moe": dataclasses.replace(MODEL.moe, capacity=CapacityConfig())},
            "set model.moe.capacity to None",
        ),
        (
            {"moe": MoEConfig(router=UniformRandomConfig(), balancers=())},
            "model.moe.router 'uniform_random'",
        ),
    ],
)
def test_models_whose_answers_would_depend_on_each_other_are_refused(changes, message):
    fields = {field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)}
    model, execution = ModelConfig(**{**fields, **changes}), ExecutionConfig()
    assert message in why_not_served(model, execution, None)
    with pytest.raises(ValueError, match=message):
        ModelExecutor(model, {})
    assert why_not_served(MODEL, execution, None) is None


def test_meshes_that_share_no_row_are_refused():
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    assert "execution.mesh.data=2" in why_not_served(MODEL, ExecutionConfig(), mesh)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="set num_pages to 32"):
        ExecutorConfig(num_pages=8, page_size=4, context_lengths=(128,))
    with pytest.raises(ValueError, match="ascending"):
        ExecutorConfig(context_lengths=(64, 32))


def test_a_kernel_that_cannot_run_is_refused_before_anything_is_compiled():
    execution = ExecutionConfig(kernels=KernelsConfig(attention="pallas_gpu"))
    for _ in range(2):
        with pytest.raises(ValueError, match="execution.kernels.attention=pallas_gpu: .* a gpu"):
            ModelExecutor(MODEL, params(), config=SIZES, execution=execution)


def test_kernels_are_compared_before_they_serve(monkeypatch):
    """Once in a process: executors are made anew when a mesh changes."""
    calls, kernels = [], KernelsConfig(state_space_dual="xla")

    def prepare(self, mesh, *, serves):
        calls.append((self, mesh, serves))

    monkeypatch.setattr(KernelsConfig, "prepare", prepare)
    for _ in range(2):
        monkeypatch.setattr(ModelExecutor, "_laid_out", lambda *_: calls.append("weights") or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ModelExecutor(MODEL, {}, execution=ExecutionConfig(kernels=kernels))
    assert calls == [(kernels, None, True), "weights", "weights"]


def test_pages_are_copied_and_held_in_host_memory():
    """More pages than one call takes, and none beside them."""
    rng = np.random.default_rng(0)
    start = {"a": rng.normal(size=(2, 40, 2, 1, 2, 3)).astype(np.float32)}
    move = make_transfers(executor().execution)
    pairs = tuple((page, 39 - page) for page in range(19))
    found = move.copy(jax.tree.map(jax.numpy.asarray, start), pairs)
    wanted = start["a"].copy()
    wanted[:, [target for _, target in pairs]] = start["a"][:, [source for source, _ in pairs]]
    np.testing.assert_array_equal(found["a"], wanted)
    pages = rng.permutation(40)[:21].tolist()
    held = move.to_host(found, pages)
    np.testing.assert_array_equal(held["a"], wanted[:, pages])
    other = pages[::-1]
    found = move.from_host(found, other, held)
    wanted[:, other] = held["a"]
    np.testing.assert_array_equal(found["a"], wanted)


def test_serving_compiles_nothing_also_after_a_reset():
    """A step reads the tokens of the one before, of any shape, or of none."""
    found = executor()
    requests = {
        0: ((1, 2, 3, 4, 5, 6, 7), Sampling(max_tokens=6, temperature=0.0)),
        1: ((2, 3), Sampling(max_tokens=6, temperature=0.0, presence_penalty=1.0)),
    }
    sizes = []
    for _ in range(3):
        found.reset()
        serve(requests, {0: 0, 1: 3})
        sizes.append(found._step._cache_size())
    assert sizes[0] == sizes[1] == sizes[2] <= len(found.programs)


def test_embeddings_fetch_the_rows_of_last_tokens_alone():
    launched = executor().launch(
        EngineStep(
            singles=(),
            pieces=(Work(0, (1, 2, 3), 0, (0,), True, 0, Sampling(pooling="last")),),
        )
    )
    arrays = launched.outputs
    assert arrays.hidden is None and arrays.logits is None
    assert arrays.last_hidden.shape == (SIZES.shapes.singles + 2, MODEL.embed_dim)
    result = executor().collect(launched)[0]
    whole = forward(MODEL, ExecutionConfig(), params(), jnp.array([[1, 2, 3]])).hidden
    np.testing.assert_allclose(result.embedding, whole[0, -1], rtol=1e-4, atol=1e-5)
