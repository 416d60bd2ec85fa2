# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a step rounds once, and what it computes again, however its loop over layers is unrolled."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.training import loss
from jaxmoe.training.loss import forward_and_nll
from tests.support.models import TINY
from tests.support.one_step import batch, params_of

BFLOAT16 = PrecisionPolicy(compute="bfloat16")


def loss_and_gradient(execution, model=TINY):
    rows = jax.tree.map(jnp.asarray, batch())

    def of(params):
        return forward_and_nll(model, execution, params, rows, train=True)[0]

    return jax.jit(jax.value_and_grad(of))


def test_experts_are_rounded_once_with_equal_values_and_gradients(monkeypatch):
    """Each layer rounding its own is the reference, bit by bit."""
    run = loss_and_gradient(ExecutionConfig(precision=BFLOAT16, remat="full"))
    found, text = run(params_of(TINY)), run.lower(params_of(TINY)).as_text()
    monkeypatch.setattr(loss, "_with_rounded_experts", lambda model, execution, params: params)
    run = loss_and_gradient(ExecutionConfig(precision=BFLOAT16, remat="full"))
    expected, before = run(params_of(TINY)), run.lower(params_of(TINY)).as_text()
    jax.tree.map(
        lambda x, y: None if jnp.array_equal(x, y) else pytest.fail("differs"), found, expected
    )
    narrow = "stablehlo.convert .*tensor<2x4x16x2x10xf32>. -> tensor<2x4x16x2x10xbf16>"
    assert re.search(narrow, text) and not re.search(narrow, before)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (TINY, {}),
        (TINY, {"precision": BFLOAT16, "telemetry": "detailed"}),
    ],
    ids=["float32", "matrices that telemetry reads"],
)
def test_parameters_stay_as_they_are_where_rounding_would_show(model, fields):
    params = jax.eval_shape(lambda: params_of(TINY))
    execution = ExecutionConfig(**fields)
    rounded = jax.eval_shape(lambda x: loss._with_rounded_experts(model, execution, x), params)
    assert rounded == params


@pytest.mark.parametrize("unroll", [1, 2], ids=["loop", "no loop"])
def test_layers_are_computed_again_in_a_loop_and_without_one(unroll):
    """XLA finds equal computations where no loop separates them."""

    def products(remat):
        run = loss_and_gradient(ExecutionConfig(remat=remat, unroll=unroll))
        text = run.lower(params_of(TINY)).compile().as_text() or ""
        return len(re.findall(r" dot\(|custom-call.*matmul", text))

    assert products("full") > products("none")
