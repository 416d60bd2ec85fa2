# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy against optax, whole and in chunks, in value and gradient."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from jaxmoe.contrib.telemetry.step import observe_head
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ForwardMultipliers, ModelConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.cross_entropy import token_nll
from jaxmoe.training.loss import summed_loss
from jaxmoe.training.objective import TokenGiven
from sharding import MeshConfig, make_mesh
from sharding.sequence_parallel import AllGatherKVConfig
from tests.support.losses import summed_nll
from tests.support.tolerances import assert_close

BATCH, LENGTH, WIDTH, VOCAB = 3, 10, 8, 13
MODEL = ModelConfig(vocab_size=VOCAB, embed_dim=WIDTH, multipliers=ForwardMultipliers(logits=0.7))


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


HIDDEN_SHAPE = (BATCH, LENGTH, WIDTH)
TARGETS = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
WEIGHTS = np.random.default_rng(1).choice([0.0, 1.0, 2.5], (BATCH, LENGTH)).astype(np.float32)


def _value_and_grad(chunk: int, weights=WEIGHTS, targets=TARGETS, factor=1.0, **fields):
    execution = ExecutionConfig(loss_chunk=chunk, **fields)

    def loss(hidden, weight):
        given = (jnp.asarray(targets), jnp.asarray(weights))
        return factor * summed_nll(hidden, weight, *given, model=MODEL, execution=execution)

    arguments = (_normal(2, *HIDDEN_SHAPE), _normal(3, WIDTH, VOCAB))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arguments)


@pytest.fixture(scope="module")
def whole():
    return _value_and_grad(0)


def test_equals_optax(whole):
    def theirs(hidden, weight):
        logits = 0.7 * hidden @ weight
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS)
        return jnp.sum(nll * WEIGHTS)

    arguments = (_normal(2, *HIDDEN_SHAPE), _normal(3, WIDTH, VOCAB))
    wanted = jax.jit(jax.value_and_grad(theirs, argnums=(0, 1)))(*arguments)
    assert_close(whole, wanted, kind="matmul")


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 64])
def test_chunks_equal_the_whole(chunk, whole):
    """3 does not divide the 10 positions, 64 exceeds them."""
    assert_close(_value_and_grad(chunk), whole, kind="matmul")


@pytest.mark.parametrize("chunk", [0, 4])
def test_weight_0_leaves_a_token_out(chunk):
    """Whatever its target, it moves neither the loss nor a gradient."""
    others = np.where(WEIGHTS == 0, (TARGETS + 1) % VOCAB, TARGETS)
    before, after = _value_and_grad(chunk), _value_and_grad(chunk, targets=others)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert not np.asarray(before[1][0])[WEIGHTS == 0].any()
    assert np.asarray(before[1][0])[WEIGHTS != 0].all(-1).any()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WithExtra(NextTokenConfig):
    """Weighs tokens by an advantage and adds a penalty that has a dimension of its own."""

    def token_loss(self, nll, given: TokenGiven):
        penalty = jnp.sum(given.extra["penalty"], axis=-1)
        return nll * given.weights * given.extra["advantage"] + nll**2 * penalty


@pytest.mark.parametrize("chunk", [5, 4])
def test_token_loss_with_extra_is_the_same_in_chunks(chunk):
    """4 does not divide the 10 positions: the padding must not add to the loss."""
    extra = {"advantage": _normal(4, BATCH, LENGTH), "penalty": _normal(5, BATCH, LENGTH, 2)}
    batch = Batch(tokens=TARGETS, targets=TARGETS, loss_weights=WEIGHTS, extra=extra)

    def value_and_grad(size: int):
        def loss(hidden, weight):
            given = {"model": MODEL, "execution": ExecutionConfig(loss_chunk=size)}
            return summed_loss(hidden, weight, batch, objective=WithExtra(), **given)[0]

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(
            _normal(2, *HIDDEN_SHAPE), _normal(3, WIDTH, VOCAB)
        )

    whole = value_and_grad(0)
    logits = 0.7 * _normal(2, *HIDDEN_SHAPE) @ _normal(3, WIDTH, VOCAB)
    nll = token_nll(logits, jnp.asarray(TARGETS))
    wanted = nll * WEIGHTS * extra["advantage"] + nll**2 * extra["penalty"].sum(-1)
    assert_close(whole[0], wanted.sum(), kind="matmul")
    assert_close(value_and_grad(chunk), whole, kind="matmul")


def test_zero_weights_give_zero_loss():
    value, grads = _value_and_grad(4, weights=np.zeros_like(WEIGHTS))
    assert value == 0.0 and not any(leaf.any() for leaf in jax.tree.leaves(grads))


def test_uniform_logits_cost_the_log_of_the_vocabulary():
    nll = token_nll(jnp.zeros((BATCH, LENGTH, VOCAB)), jnp.asarray(TARGETS))
    assert_close(nll, np.full((BATCH, LENGTH), math.log(VOCAB)), kind="elementwise")


def test_large_logits_give_finite_loss():
    logits = jnp.zeros((1, 2, VOCAB)).at[..., 4].set(1e30)
    targets = jnp.asarray([[4, 5]], jnp.int32)
    nll, slope = jax.value_and_grad(lambda z: token_nll(z, targets)[0, 0])(logits)
    assert nll == 0.0 and bool(jnp.isfinite(slope).all())
    assert token_nll(logits, targets)[0, 1] == 1e30


@pytest.mark.parametrize("chunk", [0, 3])
def test_bfloat16_is_close(chunk, whole):
    """Eight bits of mantissa in the products, f32 in all sums."""
    precision = PrecisionPolicy(compute="bfloat16")
    value, grads = _value_and_grad(chunk, precision=precision)
    assert value.dtype == jnp.float32 and {g.dtype for g in grads} == {jnp.dtype("float32")}
    assert_close((value, grads), whole, kind="matmul", dtype="bfloat16")


def test_the_divisor_of_the_loss_is_not_rounded_to_bfloat16():
    """1/85 in bfloat16 would make every gradient 0.13% larger."""
    precision = PrecisionPolicy(compute="bfloat16")
    _, plain = _value_and_grad(3, precision=precision)
    _, divided = _value_and_grad(3, factor=1 / 85, precision=precision)
    for gradient, undivided in zip(divided, plain, strict=True):
        share = jnp.sum(gradient * undivided) / jnp.sum(undivided**2)
        assert share == pytest.approx(1 / 85, rel=3e-4)


@pytest.mark.parametrize("length", [16, 24])
def test_a_chunk_that_seq_does_not_divide_equals_the_whole(length):
    """Loss, gradients and indicators with chunks of 3 and 10 positions on 4 devices of a row."""
    shape = (BATCH - 1, length)
    targets, weights = TARGETS.ravel()[:1] * np.ones(shape, np.int32), np.ones(shape, np.float32)
    batch = Batch(tokens=targets, targets=targets, loss_weights=weights)

    def values(execution):
        def loss(hidden, weight):
            nll = summed_loss(hidden, weight, batch, model=MODEL, execution=execution)[0]
            params = {"head": {"weight": weight}}
            return nll, observe_head(params, hidden, batch, MODEL, execution)

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        return run(_normal(2, *shape, WIDTH), _normal(3, WIDTH, VOCAB))

    whole = values(ExecutionConfig())
    for chunk in (3, 10):
        execution = ExecutionConfig(
            mesh=MeshConfig(data=2, seq=4), sequence_parallel=AllGatherKVConfig(), loss_chunk=chunk
        )
        with jax.set_mesh(make_mesh(execution.mesh)):
            assert_close(values(execution), whole, kind="matmul")


def _equations(jaxpr, is_in_loop=False):
    for equation in jaxpr.eqns:
        yield equation, is_in_loop
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner, is_in_loop or equation.primitive.name == "scan")


def test_chunks_compute_logits_once_and_no_device_waits_within_a_chunk():
    """Three products with the vocabulary, none of them repeated; the head travels once each way."""
    execution = ExecutionConfig(mesh=MeshConfig(data=8), loss_chunk=2)
    rows = np.zeros((8, 4), np.int32)
    batch = Batch(tokens=rows, targets=rows, loss_weights=np.ones(rows.shape, np.float32))

    def loss(hidden, weight):
        return summed_loss(hidden, weight, batch, model=MODEL, execution=execution)[0]

    with jax.set_mesh(make_mesh(execution.mesh)):
        hidden = jax.reshard(_normal(2, 8, 4, WIDTH), jax.P("data"))
        weight = jax.reshard(_normal(3, WIDTH, VOCAB), jax.P("data", "tensor"))
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, weight).jaxpr
    # Axes other than data have one device: nothing travels along them.
    names = [
        (equation.primitive.name, is_in_loop)
        for equation, is_in_loop in _equations(jaxpr)
        if "data" in equation.params.get("axes", equation.params.get("axis_name", ("data",)))
    ]
    assert names.count(("dot_general", True)) == 3 and ("dot_general", False) not in names
    travels = {"all_gather", "reduce_scatter", "psum", "psum_invariant", "all_gather_invariant"}
    assert [name for name, is_in_loop in names if is_in_loop and name in travels] == []
    assert names.count(("all_gather", False)) == names.count(("reduce_scatter", False)) == 1
    # The head is gathered after the layers, and its gradient reduced before theirs.
    assert names.count(("optimization_barrier", False)) == 2


def test_a_negative_chunk_is_refused():
    with pytest.raises(ValueError, match=r"loss_chunk=-1 must be 0 \(whole\) or positive"):
        dataclasses.replace(ExecutionConfig(), loss_chunk=-1)
