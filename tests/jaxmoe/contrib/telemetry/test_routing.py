# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Telemetry: identities of its statistics, values for planted routers, gamma_eff."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.contrib.telemetry import routing as detailed
from jaxmoe.contrib.telemetry.congestion import equilibrium, fit_congestion
from jaxmoe.contrib.telemetry.geometry import (
    activation_correlation,
    direction_coupling,
    gate_directions,
    row_similarity,
)
from jaxmoe.contrib.telemetry.step import watch_params
from jaxmoe.data.batch import Batch
from jaxmoe.data.synthetic import normalized_mutual_information
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.optim import adamw
from jaxmoe.routing import LossFreeConfig, RouterInputs, SoftmaxTopKConfig, telemetry
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from tests.support.models import TINY, tokens_for
from tests.support.tolerances import assert_close

TOKENS, EXPERTS, TOP_K = 48, 6, 2


def logits_of(seed, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(tokens, EXPERTS)) * 2.0 + np.linspace(0.0, 1.5, EXPERTS)
    return jnp.asarray(values, jnp.float32)


def observed(logits, mask, domain):
    """Statistics of a softmax router that sees these logits, detail included."""
    router = SoftmaxTopKConfig().build(num_experts=EXPERTS, top_k=TOP_K, embed_dim=EXPERTS)
    inputs = RouterInputs(
        x=logits,
        token_mask=mask,
        segment_ids=jnp.ones(logits.shape[0], jnp.int32),
        context={"domain": domain},
    )
    output = router.route({"weight": jnp.eye(EXPERTS)}, {}, inputs, train=True, key=None)
    extra = detailed.observe(output, inputs)
    return dataclasses.replace(output.statistics, extra=extra)


watch = jax.jit(observed)


def planted(seed):
    rng = np.random.default_rng(seed)
    mask = jnp.asarray(rng.random(TOKENS) < 0.8)
    return logits_of(seed), mask, jnp.asarray(rng.integers(3, size=TOKENS), jnp.int32)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**16))
def test_detailed_statistics_satisfy_their_identities(seed):
    logits, mask, domain = planted(seed)
    statistics = watch(logits, mask, domain)
    extra, real = statistics.extra, np.asarray(mask)
    together = np.asarray(extra["detail_coactivation"])
    np.testing.assert_array_equal(np.diag(together), statistics.counts)
    np.testing.assert_array_equal(together.sum(1), TOP_K * np.asarray(statistics.counts))
    np.testing.assert_array_equal(together, together.T)
    np.testing.assert_array_equal(extra["detail_domains"].sum(0), statistics.counts)
    assert float(statistics.counts.sum()) == TOP_K * float(statistics.num_tokens)
    assert int(extra["detail_z"].sum()) == statistics.num_tokens.item() == real.sum()
    assert detailed.mutual_information(statistics) >= 0.0
    probs = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)[real]
    ordered = np.sort(probs, axis=1)[:, ::-1]
    assert_close(extra["detail_margin"], (ordered[:, 1] - ordered[:, 2]).sum(), "matmul")
    assert_close(extra["detail_top1"], ordered[:, 0].sum(), "matmul")
    assert_close(extra["detail_mass"], ordered[:, :2].sum(), "matmul")
    assert_close(extra["detail_log_prob"], np.log(probs).sum(0), "matmul")
    z = np.abs(np.log(np.exp(np.asarray(logits, np.float64)[real]).sum(1))).max()
    assert z * (1 - 1e-6) <= detailed.z_max(extra["detail_z"]) <= z * np.sqrt(2) * (1 + 1e-6)
    wanted = normalized_mutual_information(np.asarray(extra["detail_domains"]))
    assert_close(detailed.domain_information(extra["detail_domains"]), wanted, "matmul")


def test_one_psum_equals_one_device():
    logits, mask, domain = planted(1)
    mesh, spread = jax.make_mesh((8,), ("data",)), PartitionSpec("data")
    local = jax.shard_map(
        lambda *given: jax.lax.psum(observed(*given), "data"),
        mesh=mesh,
        in_specs=(spread, spread, spread),
        out_specs=PartitionSpec(),
    )
    placed = jax.device_put((logits, mask, domain), NamedSharding(mesh, spread))
    ours, whole = jax.jit(local)(*placed), watch(logits, mask, domain)
    assert_close(ours, whole, "matmul")
    for name in ("detail_coactivation", "detail_domains", "detail_z"):
        np.testing.assert_array_equal(ours.extra[name], whole.extra[name])


@pytest.mark.parametrize("is_sharp", [True, False])
def test_mutual_information_of_certain_and_uniform_routers(is_sharp):
    """Certain of a different expert for each token, or uniform for all."""
    kinds = jnp.arange(TOKENS) % EXPERTS
    logits = jax.nn.one_hot(kinds, EXPERTS) * (50.0 if is_sharp else 0.0)
    statistics = watch(logits, jnp.ones(TOKENS, bool), kinds.astype(jnp.int32))
    wanted = np.log(EXPERTS) if is_sharp else 0.0
    assert_close(detailed.mutual_information(statistics), wanted, "matmul")


def test_domains_outside_the_table_share_its_last_row():
    domain = jnp.asarray([-1, 3, 14, 15, 99] + [0] * (TOKENS - 5), jnp.int32)
    counts = watch(logits_of(0), jnp.ones(TOKENS, bool), domain).extra["detail_domains"]
    rows = np.asarray(counts.sum(1)) / TOP_K
    assert (rows[0], rows[3], rows[14], rows[15]) == (TOKENS - 5, 1, 1, 3)


def test_no_token_gives_finite_scalars():
    statistics = watch(logits_of(0), jnp.zeros(TOKENS, bool), jnp.zeros(TOKENS, jnp.int32))
    stacked = jax.tree.map(lambda leaf: leaf[None], statistics)
    scalars = telemetry.summarise(stacked) | detailed.summarise_detailed(stacked)
    assert all(np.isfinite(value) for value in scalars.values())


def test_coactivation_of_two_experts_chosen_together():
    """Two experts always chosen together, and one alone."""
    together = jnp.asarray([[[4.0, 4.0, 0.0], [4.0, 4.0, 0.0], [0.0, 0.0, 2.0]]])
    assert detailed.coactivation(together).tolist() == [1.0]


def test_router_weights_are_found_by_name():
    assert watch_params({"head": jnp.ones(3)}) == {}
    weight = jnp.asarray([[[1.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]])  # L, D, E
    params = {"moe_blocks_0": {"moe": {"router": {"weight": weight}}}}
    assert_close(watch_params(params), {"row_similarity": 0.5}, "elementwise")


@pytest.mark.slow
def test_detailed_statistics_are_in_the_step_metrics():
    """With micro-batches and rematerialised layers, which must not count twice."""
    moe = dataclasses.replace(TINY.moe, router=SoftmaxTopKConfig(bias=LossFreeConfig(rate=0.1)))
    model, optimizer = dataclasses.replace(TINY, moe=moe), adamw(1e-3)
    tokens, targets = tokens_for(model)
    batch = Batch(tokens=tokens, targets=targets, loss_weights=jnp.ones(tokens.shape))
    execution = ExecutionConfig(telemetry="detailed", remat="full")
    state = init_state(model, optimizer, jax.random.key(0))
    brief = jax.jit(lambda params: forward(model, ExecutionConfig(), params, tokens).statistics)
    wanted = brief(state.params)
    step = make_train_step(model, optimizer, execution=execution, accumulation=2)
    state, metrics = step(state, batch)
    plain = telemetry.summarise(wanted)
    assert set(metrics.router) - set(plain) == {
        "top1_probability",
        "mutual_information",
        "z_max",
        "topk_margin",
        "topk_mass",
        "coactivation",
        "row_similarity",
        "bias_range",
        "bias_max",
    }
    assert_close(metrics.load, telemetry.load(wanted), "elementwise")
    assert_close({name: metrics.router[name] for name in plain}, plain, "end_to_end")
    assert_close(metrics.router["bias_range"], 0.2, "elementwise")
    assert all(np.isfinite(value) for value in metrics.router.values())
    assert 0.5 < metrics.router["topk_mass"] <= 1.0
    # A mean of logarithms is below the logarithm of the mean.
    mean = np.log(wanted.prob_sum / wanted.num_tokens[:, None])
    quality = metrics.measures["quality"]
    assert quality.shape == metrics.load.shape and (quality < mean).all()
    assert (np.abs(metrics.measures["indicators"]["direction_coupling"]) < 1.0).all()


# Geometry.


def test_row_similarity_against_loops():
    weight = np.random.default_rng(0).normal(size=(3, 5, 4)) + 0.5
    unit = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    cosines = np.einsum("ldi,ldj->lij", unit, unit)
    wanted = [row[~np.eye(4, dtype=bool)].mean() for row in cosines]
    assert_close(row_similarity(jnp.asarray(weight, jnp.float32)), np.array(wanted), "matmul")


def test_coupled_experts_score_1_and_uncoupled_ones_less():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(64, 4)), jnp.float32)
    weight = jnp.eye(4, 3)
    aligned = jnp.broadcast_to(weight.T[:, :, None, None], (3, 4, 2, 5))
    assert_close(direction_coupling(weight, gate_directions(aligned)), np.ones(3), "elementwise")
    of_norm = activation_correlation(x, jnp.abs(x @ weight), aligned)
    assert_close(of_norm, np.ones(3), "matmul")
    strange = jnp.asarray(rng.normal(size=(3, 4, 2, 5)), jnp.float32)
    assert np.abs(direction_coupling(weight, gate_directions(strange))).max() < 0.99
    assert not activation_correlation(x, jnp.ones((64, 3)), aligned).any()


# gamma_eff.


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), gamma=st.sampled_from([0.0, 0.3, 5.0, 60.0, 5000.0]))
def test_equilibrium_is_the_fixed_point(seed, gamma):
    quality = np.random.default_rng(seed).normal(size=(2, 16)) * 3.0
    rho = equilibrium(quality, gamma)
    answer = np.exp(quality - gamma * rho)
    np.testing.assert_allclose(rho, answer / answer.sum(-1, keepdims=True), atol=1e-9)


def test_equilibrium_spreads_with_gamma():
    quality = np.random.default_rng(0).normal(size=32)
    fullest = [equilibrium(quality, gamma).max() for gamma in (0.0, 1.0, 10.0, 100.0)]
    assert (np.diff(fullest) < 0.0).all()
    # Near the even load it is a softmax at a temperature.
    cool = np.exp(quality / (1.0 + 2.0 / 32))
    assert np.abs(equilibrium(quality, 2.0) - cool / cool.sum()).sum() < 0.05


@pytest.mark.parametrize("gamma", [3.0, 27.0])
def test_planted_gamma_is_recovered(gamma):
    """A planted coefficient is found, and the interval covers it."""
    rng = np.random.default_rng(3)
    quality = rng.normal(size=64) * 1.5
    seen = quality + rng.normal(size=(50, 64)) * 0.05
    load = np.stack([rng.multinomial(20_000, equilibrium(quality, gamma)) for _ in range(50)])
    found = fit_congestion(load, seen)
    assert found.low <= gamma <= found.high
    assert found.low <= found.gamma <= found.high
    assert abs(found.gamma - gamma) < 0.05 * gamma and found.high - found.low < 0.2 * gamma
    assert found.distance < 0.05


@pytest.mark.parametrize(
    ("load", "quality", "text"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), r"^load \(2, 3\) and quality \(2, 4\) must both be"),
        (np.zeros((2, 3)), np.ones((2, 3)), "^load must not be negative, and each batch must"),
    ],
)
def test_refusals(load, quality, text):
    with pytest.raises(ValueError, match=text):
        fit_congestion(load, quality)
