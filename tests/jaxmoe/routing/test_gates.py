# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gates: what each computes, the size SqrtGate keeps, and the corners where a square root breaks.

To add a gate: a row in GATE_CASES.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.routing import GATES, Selection, SqrtGateConfig
from jaxmoe.routing.base import token_major
from tests.support.tolerances import assert_close

# What one token's gates are, from its log scores.
GATE_CASES = {
    "softmax": lambda scores: np.exp(scores),
    "renormalized": lambda scores: np.exp(scores) / np.exp(scores).sum(-1, keepdims=True),
    "sqrt": lambda scores: np.sqrt(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)),
}
every_gate = pytest.mark.parametrize("name", GATES)


def test_case_table_equals_registry():
    assert set(GATE_CASES) == set(GATES)


def selection_of(scores, token_mask=None) -> Selection:
    """A token-major selection with these scores [T K]; the ids do not matter to a gate."""
    num_tokens, top_k = scores.shape
    mask = np.ones(num_tokens, bool) if token_mask is None else token_mask
    ids = jnp.zeros((num_tokens, top_k), jnp.int32)
    return token_major(ids, jnp.asarray(scores, jnp.float32), jnp.asarray(mask), 64)


def gates_of(name, scores):
    return _gates(name, jnp.asarray(scores, jnp.float32))


@functools.partial(jax.jit, static_argnames="name")
def _gates(name, scores):
    selection = selection_of(scores)
    return GATES[name]().build()(selection, selection.scores).reshape(scores.shape)


@every_gate
def test_against_numpy(name):
    logits = np.random.default_rng(0).normal(size=(7, 3))
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True) + 1.0)
    assert_close(gates_of(name, scores), GATE_CASES[name](scores), "elementwise")


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_sqrt_gates_have_length_1(scale):
    scores = np.random.default_rng(1).normal(size=(64, 8)) * scale
    gates = gates_of("sqrt", scores)
    assert_close(jnp.sum(gates**2, axis=-1), np.ones(64), "elementwise")


# k, standard deviation of the logits: RMS with renormalized gates, alone and beside a shared
# expert. Reference values were measured over T=512, D=1024.
MIXTURES = {
    (2, 0.0): (0.708, 1.224),
    (8, 0.0): (0.354, 1.060),
    (8, 1.0): (0.478, 1.108),
    (8, 3.0): (0.761, 1.259),
    (64, 0.0): (0.125, 1.009),
}


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize(("case", "wanted"), MIXTURES.items(), ids=str)
def test_sqrt_gates_keep_the_size_of_a_mixture(case, wanted):
    """Experts of RMS 1 with independent outputs: what reaches the residual stream has RMS 1 with
    SqrtGate for every k and temperature, with a shared expert too; with others it depends on both
    (HyperP, arXiv 2603.28743)."""
    top_k, spread = case
    rng = np.random.default_rng(top_k)
    scores = rng.normal(size=(2048, top_k)) * spread
    outputs = rng.standard_normal((2048, top_k, 32), dtype=np.float32)
    shared = jnp.asarray(rng.standard_normal((2048, 32), dtype=np.float32))
    mixed, with_shared = {}, {}
    for name in ("renormalized", "sqrt"):
        gates = np.asarray(gates_of(name, scores))
        routed = jnp.asarray(np.einsum("tk,tkd->td", gates, outputs))
        mixed[name] = rms(routed)
        with_shared[name] = rms(GATES[name]().mix_shared(routed, shared))
    # One percent is four standard errors of the RMS of 2048 * 32 values.
    assert mixed["sqrt"] == pytest.approx(1.0, rel=0.01)
    assert with_shared["sqrt"] == pytest.approx(1.0, rel=0.01)
    length = np.sqrt(np.mean(np.sum(np.square(gates_of("renormalized", scores)), axis=-1)))
    assert mixed["renormalized"] == pytest.approx(length, rel=0.01)
    # Two percent: the length itself is that of 2048 drawn tokens, the reference's of 512.
    assert mixed["renormalized"] == pytest.approx(wanted[0], rel=0.02)
    assert with_shared["renormalized"] == pytest.approx(wanted[1], rel=0.02)


def test_the_slope_of_sqrt_gates():
    """d sqrt(g_i) / d s_j = sqrt(g_i) (delta_ij - g_j) / 2."""
    scores = np.random.default_rng(2).normal(size=(1, 4))
    slope = jax.jacobian(lambda s: gates_of("sqrt", s)[0])(jnp.asarray(scores, jnp.float32))[:, 0]
    share = np.exp(scores[0]) / np.exp(scores[0]).sum()
    assert_close(slope, 0.5 * np.sqrt(share)[:, None] * (np.eye(4) - share), "elementwise")


# sqrt(softmax) would give 0 with an infinite slope from the second row on.
EXTREMES = [[0.0, 0.0], [0.0, -160.0], [1e4, -1e4], [-1e4, 1e4], [-1e4, -1e4]]


@every_gate
def test_finite_in_value_and_slope_where_probabilities_underflow(name):
    logits = jnp.asarray(EXTREMES, jnp.float32)

    def gates(logits):
        return gates_of(name, jax.nn.log_softmax(logits, axis=-1))

    value, back = jax.vjp(gates, logits)
    assert np.isfinite(value).all()
    for cotangent in (jnp.ones_like(value), jnp.asarray([[1.0, -1.0]] * len(EXTREMES))):
        assert np.isfinite(back(cotangent)[0]).all()


def test_sqrt_gates_are_positive_where_probabilities_underflow():
    gates = gates_of("sqrt", jnp.asarray([[0.0, -160.0]]))
    assert gates[0, 1] == pytest.approx(np.exp(-80.0), rel=1e-4)  # 2e-35; exp(-160) is 0 in f32


@every_gate
def test_empty_slots_are_exactly_0_and_have_no_slope(name):
    """Token 1 is padding; token 2 has one slot of three, as a router with few choices may say."""
    scores = np.log(np.full((3, 3), 0.25))
    selection = selection_of(scores, np.array([True, False, True]))
    given = selection.scores.at[7:].set(-jnp.inf)
    gate = GATES[name]()
    value, back = jax.vjp(lambda s: gate(selection, s), given)
    assert (value[np.isneginf(given)] == 0.0).all() and (value[np.isfinite(given)] > 0.0).all()
    slope = np.asarray(back(jnp.arange(1.0, 10.0))[0])
    assert np.isfinite(slope).all() and (slope[np.isneginf(given)] == 0.0).all()
    if name != "softmax":
        assert value[6] == 1.0  # the only one of its token


@pytest.mark.parametrize("name", ["renormalized", "sqrt"])
def test_selections_by_experts_are_refused(name):
    ids = jnp.zeros(4, jnp.int32)
    selection = Selection(token_ids=ids, expert_ids=ids, scores=jnp.zeros(4))
    text = (
        "this gate renormalizes over the experts of a token and needs a token-major selection:"
        " with routers in which experts choose tokens, use the gate softmax"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        GATES[name]()(selection, selection.scores)


@every_gate
def test_mixing_keeps_the_dtype(name):
    one = jnp.ones((2, 3), jnp.bfloat16)
    mixed = GATES[name]().mix_shared(one, one)
    assert mixed.dtype == jnp.bfloat16
    wanted = np.full((2, 3), np.sqrt(2.0) if name == "sqrt" else 2.0)
    assert_close(mixed, wanted, "elementwise", "bfloat16")


def test_single_expert_has_gate_1():
    assert SqrtGateConfig()(selection_of(np.array([[-3.0]])), jnp.array([-3.0])).item() == 1.0
