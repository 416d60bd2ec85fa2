# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whole programs are traced and lowered for a described H100, with every choice of kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxmoe.contrib.rl.objective import ADVANTAGES, OLD, REFERENCE, PolicyGradientConfig
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig, KernelsConfig, ServedConfig
from jaxmoe.layers.mixers import AttentionConfig
from jaxmoe.models.cache import initial_cache
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.models.transformer import forward
from jaxmoe.optim import adamw
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.serve.device.pages import initial_pools
from jaxmoe.serve.device.rows import no_limits
from jaxmoe.serve.device.step import StepInputs, StepOptions, make_step
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding.sequence_parallel import PageTables
from tests.support import gpus

pytestmark = gpus.triton_may_go

BATCH, LENGTH = 2, 128
MODEL = ModelConfig(
    vocab_size=256,
    num_layers=2,
    embed_dim=128,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=64),
    moe=MoEConfig(num_experts=4, top_k=2, expert_dim=128),
)
DEVICE = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")
MESH = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=DEVICE)

CHOICES = {"default": None, "pallas_gpu": "pallas_gpu", "xla": "xla"}
PRECISIONS = ("bfloat16", "float32")


def execution_of(choice, compute):
    kernels = KernelsConfig(attention=CHOICES[choice], grouped_swiglu=CHOICES[choice])
    return ExecutionConfig(kernels=kernels, precision=PrecisionPolicy(compute=compute))


def lowered(function, *arguments):
    with jax.sharding.use_abstract_mesh(MESH):
        traced = function.trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def params_of(model=MODEL):
    return parameter_table(model).tree(lambda row: jax.ShapeDtypeStruct(row.shape, jnp.float32))


def has_kernels(text):
    return "mosaic_gpu" in text or "triton" in text


def per_layer(number):
    """Return the calls of one layer: JAX 0.10 writes equal layers once, 0.11 each of them."""
    is_written_once = jax.__version_info__ < (0, 11)
    layers = 1 if is_written_once else MODEL.num_layers
    assert number % layers == 0
    return number // layers


def calls_of_cudnn(text):
    """Return the calls of a layer in the forward and in the backward pass."""
    counts = (text.count(f"@__cudnn$fmhaSoftmax{which}(") for which in ("", "Backward"))
    return tuple(map(per_layer, counts))


@pytest.mark.parametrize("compute", PRECISIONS)
@pytest.mark.parametrize("choice", CHOICES)
def test_training_step(choice, compute):
    execution, optimizer = execution_of(choice, compute), adamw(1e-3)
    state = jax.eval_shape(lambda key: init_state(MODEL, optimizer, key), jax.random.key(0))
    ids = jnp.zeros((BATCH, LENGTH), jnp.int32)
    batch = Batch(ids, ids, jnp.ones((BATCH, LENGTH), jnp.float32))
    step = make_train_step(MODEL, optimizer, execution=execution)
    text = lowered(step, state, batch)
    assert has_kernels(text) == (choice != "xla")
    is_measured = choice == "default" and compute == "bfloat16"
    assert calls_of_cudnn(text) == ((1, 1) if is_measured else (0, 0))


@pytest.mark.parametrize("choice", CHOICES)
def test_step_of_reinforcement_learning(choice):
    """Answers lie in packed rows, whose segments cuDNN does not know."""
    execution, optimizer = execution_of(choice, "bfloat16"), adamw(1e-3)
    state = jax.eval_shape(lambda key: init_state(MODEL, optimizer, key), jax.random.key(0))
    ids = jnp.ones((BATCH, LENGTH), jnp.int32)
    ones = jnp.ones((BATCH, LENGTH), jnp.float32)
    extra = dict.fromkeys((ADVANTAGES, OLD, REFERENCE), ones)
    batch = Batch(ids, ids, ones, segment_ids=ids, extra=extra)
    objective = PolicyGradientConfig(beta=0.1)
    step = make_train_step(MODEL, optimizer, execution=execution, objective=objective)
    text = lowered(step, state, batch)
    assert has_kernels(text) == (choice != "xla")
    assert calls_of_cudnn(text) == (0, 0)


@pytest.mark.parametrize("length", [1, 64])
@pytest.mark.parametrize("choice", ["default", "pallas_gpu"])
def test_decoding_and_prefill(choice, length):
    execution = execution_of(choice, "bfloat16")
    cache = jax.eval_shape(
        functools.partial(initial_cache, MODEL, execution, batch=BATCH, length=LENGTH)
    )
    ids = jax.ShapeDtypeStruct((BATCH, length), jnp.int32)

    @jax.jit
    def step(params, tokens, positions, cache):
        output = forward(MODEL, execution, params, tokens, positions=positions, cache=cache)
        return output.logits, output.cache

    assert has_kernels(lowered(step, params_of(), ids, ids, cache))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_step_of_serving(choice):
    """Pages are read where they are, by single tokens and by pieces of prompts."""
    execution = ServedConfig.of(execution_of(choice, "bfloat16"))
    singles, pieces, length, width, pages, size = 4, 1, 32, 16, 64, 16
    tokens, rows = singles + pieces * length, singles + pieces
    pools = jax.eval_shape(
        functools.partial(initial_pools, MODEL, execution, pages=pages, size=size)
    )

    def ids(*shape):
        return np.zeros(shape, np.int32)

    tables = PageTables(ids(tokens), ids(singles, width), ids(pieces, width))
    given = (ids(tokens), ids(tokens), tables, ids(rows), ids(rows), ids(rows))
    limits = no_limits(rows, MODEL.vocab_size)
    inputs = StepInputs(*given, limits, np.bool_(False), drawn=ids(rows), sources=ids(tokens))
    step = make_step(MODEL, execution, StepOptions())
    text = lowered(step, params_of(), None, pools, inputs)
    assert has_kernels(text) == (choice != "xla")
    # One for single tokens and one for pieces, each with one that merges.
    assert per_layer(text.count("xla.gpu.triton")) == (0 if choice == "xla" else 4)
    assert (f"{width * size}x1x2x64xbf16" in text) == (choice == "xla"), "a gather of pages"
