# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balancers and what is watched of a router: oracles, units, gradients, and the global batch.

To add a balancer: a row in BALANCER_CASES.
"""

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.routing import (
    BALANCERS,
    Extent,
    LoadBalanceConfig,
    RouterInputs,
    RouterOutput,
    RouterStatistics,
    SoftmaxTopKConfig,
    TopOneBalanceConfig,
    telemetry,
)
from jaxmoe.routing.balancers import (
    StatisticsBalancer,
    WeightsBalancer,
    conversions,
    load_balance,
    of_statistics,
    pool_layers,
    router_z,
)
from jaxmoe.routing.base import sum_statistics, token_major
from tests.support.dense_moe import choose
from tests.support.tolerances import assert_close

TOKENS, EXPERTS, TOP_K = 24, 6, 2


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def plain_load_balance(logits):
    """E * sum_i f_i P_i."""
    chosen = choose(logits, TOP_K, np.ones(len(logits), bool))
    return EXPERTS * np.sum(chosen.mean(0) / TOP_K * softmax(logits).mean(0))


def plain_router_z(logits):
    return np.mean(np.log(np.exp(logits).sum(-1)) ** 2)


def plain_top_one(logits):
    """E * sum_i f_i^2 / p_1."""
    probs = softmax(logits)
    return EXPERTS * np.sum(probs.mean(0) ** 2) / probs.max(-1).mean()


def plain_squared_variation(sums):
    return np.var(sums) / np.mean(sums) ** 2


def plain_gates(logits):
    """Probabilities renormalized over the chosen."""
    gates = softmax(logits) * choose(logits, TOP_K, np.ones(len(logits), bool))
    return gates / gates.sum(-1, keepdims=True)


# What each balancer reads and, of those of the statistics, the unweighted loss of one layer from
# its logits [T E]. Those of the weights: see test_coupling.py.
BALANCER_CASES = {
    "load_balance": ("statistics", plain_load_balance),
    "router_z": ("statistics", plain_router_z),
    "top_one_balance": ("statistics", plain_top_one),
    # Of experts that all compute; with others beside them in test_moe_plus_plus.py.
    "heterogeneous": ("statistics", plain_load_balance),
    "importance_variation": (
        "statistics",
        lambda logits: plain_squared_variation(plain_gates(logits).sum(0)),
    ),
    "load_variation": (
        "statistics",
        lambda logits: plain_squared_variation(
            choose(logits, TOP_K, np.ones(len(logits), bool)).sum(0)
        ),
    ),
    "coupling": ("weights", None),
}
OF_STATISTICS = [name for name, (reads, _) in BALANCER_CASES.items() if reads == "statistics"]


def test_case_table_equals_registry():
    assert set(BALANCER_CASES) == set(BALANCERS)
    protocols = {"statistics": StatisticsBalancer, "weights": WeightsBalancer}
    for name, (reads, _) in BALANCER_CASES.items():
        assert BALANCERS[name].reads == reads
        assert isinstance(BALANCERS[name](), protocols[reads])


def statistics_of(logits) -> RouterStatistics:
    return _statistics(jnp.asarray(logits, jnp.float32))


@jax.jit
def _statistics(logits):
    _, ids = jax.lax.top_k(logits, TOP_K)
    mask = jnp.ones(logits.shape[0], bool)
    probs = jax.nn.softmax(logits, axis=-1)
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids, axis=-1)
    selection = token_major(ids.astype(jnp.int32), scores, mask, EXPERTS)
    statistics = sum_statistics(logits, probs, selection.expert_ids, mask)
    output = RouterOutput(selection=selection, logits=logits, probs=probs, statistics=statistics)
    inputs = RouterInputs(
        x=logits, token_mask=mask, segment_ids=jnp.ones(logits.shape[0], jnp.int32)
    )
    return observed(output, inputs)


def observed(output, inputs):
    """Return the statistics with those that balancers add."""
    seen = [
        b.observe(output, inputs)
        for b in of_statistics(BALANCERS[name]() for name in OF_STATISTICS)
    ]
    # What routers hand on for balancers; any sums will do here.
    handed = {"smooth_load": output.statistics.counts}
    return dataclasses.replace(
        output.statistics, extra=functools.reduce(operator.or_, seen, handed)
    )


def statistics_from(counts, prob_sum, num_tokens) -> RouterStatistics:
    """Return statistics with these loads and probabilities."""
    counts, zero = jnp.asarray(counts, jnp.float32), jnp.zeros(np.shape(num_tokens))
    return RouterStatistics(
        num_tokens=jnp.asarray(num_tokens, jnp.float32),
        counts=counts,
        kept=counts,
        prob_sum=jnp.asarray(prob_sum, jnp.float32),
        z_sum=zero,
        entropy_sum=zero,
    )


def drawn(seed, tokens=TOKENS):
    """Logits of an uneven router."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(tokens, EXPERTS)) + np.linspace(0.0, 1.5, EXPERTS)


@pytest.mark.parametrize("name", OF_STATISTICS)
def test_against_numpy(name):
    wanted = BALANCER_CASES[name][1](drawn(0))
    loss = BALANCERS[name](coefficient=0.5).loss(statistics_of(drawn(0)))
    assert_close(loss, 0.5 * wanted, "matmul")


@pytest.mark.parametrize("name", OF_STATISTICS)
def test_losses_of_layers_are_added(name):
    layers = [statistics_of(drawn(seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    balancer = BALANCERS[name]()
    wanted = sum(float(balancer.loss(layer)) for layer in layers)
    assert_close(balancer.loss(stacked), wanted, "elementwise")


@pytest.mark.parametrize("name", OF_STATISTICS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**16))
def test_statistics_of_parts_add_up(name, seed):
    logits, cut = drawn(seed), TOKENS // 3
    added = statistics_of(logits[:cut]) + statistics_of(logits[cut:])
    balancer = BALANCERS[name]()
    assert_close(balancer.loss(added), balancer.loss(statistics_of(logits)), "elementwise")


@pytest.mark.parametrize("name", OF_STATISTICS)
def test_loss_without_tokens_is_zero(name):
    nothing = jax.tree.map(jnp.zeros_like, statistics_of(drawn(0)))
    value, gradient = jax.value_and_grad(BALANCERS[name]().loss)(nothing)
    assert value == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", BALANCERS)
def test_coefficients_are_finite_and_not_negative(name):
    for coefficient in (-0.1, float("nan"), float("inf")):
        text = f"coefficient={coefficient} of {name} must be finite and not negative"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            BALANCERS[name](coefficient=coefficient)


# The unit of the load-balancing loss.


def test_load_balance_is_1_for_uniform_probabilities():
    fair = np.full(EXPERTS, TOKENS / EXPERTS)
    loads = np.array([TOKENS, TOKENS, 0, 0, 0, 0])
    assert_close(load_balance(statistics_from(loads, fair, TOKENS)), 1.0, "elementwise")


def test_load_balance_is_1_for_uniform_load():
    probs = np.array([TOKENS, 0, 0, 0, 0, 0])
    fair = np.full(EXPERTS, TOKENS * TOP_K / EXPERTS)
    assert_close(load_balance(statistics_from(fair, probs, TOKENS)), 1.0, "elementwise")


def test_load_balance_is_e_for_a_collapsed_router():
    """One expert has all load and probability."""
    one = np.array([TOKENS, 0, 0, 0, 0, 0])
    assert_close(load_balance(statistics_from(one, one, TOKENS)), float(EXPERTS), "elementwise")


def test_load_balance_may_be_below_1():
    """Load and mean probability may be anti-correlated."""
    statistics = statistics_from([3, 3, 0], [1.5, 1.5, 3.0], 6)
    assert_close(load_balance(statistics), 0.75, "elementwise")


def test_load_balance_gradient_passes_through_probabilities_alone():
    statistics = statistics_of(drawn(1))
    gradient = jax.grad(lambda s: load_balance(s))(statistics)
    assert not gradient.counts.any() and not gradient.kept.any()
    share = np.asarray(statistics.counts) / (TOKENS * TOP_K)
    assert_close(gradient.prob_sum, EXPERTS * share / TOKENS, "elementwise")

    def frozen(logits):
        """E / T * sum over tokens of p . f, with f a constant."""
        return EXPERTS * jnp.mean(jax.nn.softmax(logits, axis=-1) @ jnp.asarray(share))

    logits = jnp.asarray(drawn(1), jnp.float32)
    ours = jax.grad(lambda z: load_balance(statistics_of(z)))(logits)
    assert_close(ours, jax.grad(frozen)(logits), "elementwise")


def test_z_loss_of_zero_logits_is_the_squared_logarithm_of_e():
    logits = np.zeros((TOKENS, EXPERTS))
    assert_close(router_z(statistics_of(logits)), np.log(EXPERTS) ** 2, "elementwise")
    shifted = router_z(statistics_of(logits - np.log(EXPERTS)))
    assert_close(shifted, 0.0, "elementwise")  # unlike a softmax, it sees a shift of all logits


def test_z_loss_gradient():
    """d/dz_tj = 2 lse_t p_tj / T."""
    logits = drawn(2)
    ours = jax.grad(lambda z: router_z(statistics_of(z)))(jnp.asarray(logits, jnp.float32))
    lse = np.log(np.exp(logits).sum(-1, keepdims=True))
    assert_close(ours, 2.0 * lse * softmax(logits) / TOKENS, "elementwise")


def test_top_one_balance_of_even_collapsed_and_uniform_routers():
    """1 for an even one-hot router, E for a collapsed one, E for a uniform one."""
    sure, balancer = 200.0, TopOneBalanceConfig(coefficient=1.0)
    even = sure * np.eye(EXPERTS)[np.arange(TOKENS) % EXPERTS]
    one = sure * np.eye(EXPERTS)[np.zeros(TOKENS, int)]
    for logits, wanted in ((even, 1.0), (one, EXPERTS), (0.0 * one, EXPERTS)):
        assert_close(balancer.loss(statistics_of(logits)), float(wanted), "elementwise")
    warm = TopOneBalanceConfig(coefficient=1.0, temperature=1e3)
    assert BALANCERS["top_one_balance"] is TopOneBalanceConfig
    with pytest.raises(ValueError, match="temperature=0"):
        dataclasses.replace(warm, temperature=0.0)


@pytest.mark.parametrize("mask_every", [None, 5])
def test_sequence_scope_is_the_mean_over_rows(mask_every):
    """Scope `sequence`: the mean over rows of each row's own loss, without rows of padding."""
    logits, length = drawn(7), TOKENS // 4
    mask = np.ones(TOKENS, bool)
    if mask_every:
        mask[::mask_every] = False
        mask[:length] = False
    config = LoadBalanceConfig(coefficient=1.0, scope="sequence")
    router = SoftmaxTopKConfig().build(num_experts=EXPERTS, top_k=TOP_K, embed_dim=EXPERTS)
    inputs = RouterInputs(
        x=jnp.asarray(logits, jnp.float32),
        token_mask=jnp.asarray(mask),
        segment_ids=jnp.ones(TOKENS, jnp.int32),
        extent=Extent(sequence_length=length),
    )

    @jax.jit
    def loss(x):
        given = inputs.replace(x=x)
        output = router.route({"weight": jnp.eye(EXPERTS)}, {}, given, train=True, key=None)
        statistics = dataclasses.replace(output.statistics, extra=config.observe(output, given))
        return config.loss(statistics)

    rows = [slice(start, start + length) for start in range(0, TOKENS, length)]
    values = [plain_load_balance(logits[row][mask[row]]) for row in rows if mask[row].any()]
    assert_close(loss(inputs.x), np.mean(values), "matmul")
    gradient = jax.grad(loss)(inputs.x)
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[~mask].any()


# The units of others, each after its own published definition.


def huggingface(logits):
    """Per choice k the share of tokens, times the mean probability, summed over k and E, times E:
    every token counts K times, so a uniform router has K."""
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_K]
    one_hot = np.eye(EXPERTS)[order]  # T, K, E
    return EXPERTS * np.sum(one_hot.mean(0) * softmax(logits).mean(0)[None, :])


def megatron(logits):
    """sum_i (sum of probabilities)_i * count_i, times E / (T^2 K)."""
    counts = choose(logits, TOP_K, np.ones(len(logits), bool)).sum(0)
    return np.sum(softmax(logits).sum(0) * counts) * EXPERTS / (len(logits) ** 2 * TOP_K)


def megablocks(logits):
    """count . (mean of probabilities), times E / (layers T K); here one layer."""
    counts = choose(logits, TOP_K, np.ones(len(logits), bool)).sum(0)
    return np.dot(counts, softmax(logits).mean(0)) * EXPERTS / (len(logits) * TOP_K)


UNITS = {"huggingface": huggingface, "megatron": megatron, "megablocks": megablocks}


@pytest.mark.parametrize("unit", UNITS)
def test_conversions(unit):
    ours = float(load_balance(statistics_of(drawn(3))))
    assert set(conversions(ours, top_k=TOP_K)) == {"jaxmoe", *UNITS}
    assert conversions(ours, top_k=TOP_K)["jaxmoe"] == ours
    assert_close(conversions(ours, top_k=TOP_K)[unit], UNITS[unit](drawn(3)), "matmul")


def test_hugging_face_pools_layers():
    """Two layers that prefer opposite experts, each as uneven as can be, look uniform together.

    The comparison with transformers itself is in test_huggingface_parity.py.
    """
    counts = np.array([[TOKENS, 0, 0, 0, 0, 0], [0, TOKENS, 0, 0, 0, 0]]) * 1.0
    layers = statistics_from(counts, counts, np.full(2, float(TOKENS)))
    values = load_balance(layers)
    assert_close(values, np.full(2, float(EXPERTS)), "elementwise")
    pooled = float(load_balance(pool_layers(layers)))
    assert_close(pooled, EXPERTS / 2, "elementwise")
    units = conversions(float(values.mean()), top_k=TOP_K, pooled=pooled)
    assert units == {
        "jaxmoe": 6.0,
        "megatron": 6.0,
        "megablocks": 6.0,
        "huggingface": TOP_K * pooled,
    }
    one = jax.tree.map(lambda leaf: leaf[0], layers)
    jax.tree.map(np.testing.assert_array_equal, pool_layers(one), one)


# The global batch.


@pytest.fixture(scope="module")
def uneven_batch():
    """Return tokens whose preferences differ by device, and a router that follows them."""
    rng = np.random.default_rng(4)
    directions = np.repeat(rng.normal(size=(8, 5)) * 2.0, 16, axis=0)
    x = jnp.asarray(directions + rng.normal(size=(128, 5)), jnp.float32)
    return jnp.asarray(rng.normal(size=(5, EXPERTS)), jnp.float32), x


def losses_of(statistics):
    return sum(BALANCERS[name](coefficient=1.0).loss(statistics) for name in OF_STATISTICS)


def routed_statistics(weight, x):
    router = SoftmaxTopKConfig().build(num_experts=EXPERTS, top_k=TOP_K, embed_dim=5)
    inputs = RouterInputs(
        x=x, token_mask=jnp.ones(x.shape[0], bool), segment_ids=jnp.ones(x.shape[0], jnp.int32)
    )
    return observed(router.route({"weight": weight}, {}, inputs, train=True, key=None), inputs)


def test_one_psum_makes_eight_devices_equal_one(uneven_batch):
    """In value and gradient; the mean of the losses of the devices differs."""
    mesh = jax.make_mesh((8,), ("data",))
    specs = (PartitionSpec(), PartitionSpec("data"))

    def sharded(scope):
        def body(weight, x):
            statistics = routed_statistics(weight, x)
            if scope == "global":
                return losses_of(jax.lax.psum(statistics, "data"))
            return jax.lax.pmean(losses_of(statistics), "data")

        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        return jax.jit(jax.value_and_grad(run, argnums=(0, 1)))

    def whole(weight, x):
        return losses_of(routed_statistics(weight, x))

    value, gradients = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(*uneven_batch)
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(uneven_batch, specs, strict=True)
    ]
    assert_close(sharded("global")(*placed), (value, gradients), "matmul")
    local, _ = sharded("local")(*placed)
    assert local > value + 0.1


# What is watched.


def test_telemetry_of_a_fair_and_of_a_collapsed_layer():
    fair = statistics_from([4] * 6, [2] * 6, 12)
    one = statistics_from([12, 12, 0, 0, 0, 0], [12, 0, 0, 0, 0, 0], 12)
    one = one.replace(kept=jnp.asarray([6.0, 6.0, 0, 0, 0, 0]))
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), fair, one)
    assert_close(telemetry.max_violation(both), np.array([0.0, 2.0]), "elementwise")
    assert_close(telemetry.dropped_fraction(both), np.array([0.0, 0.5]), "elementwise")
    assert_close(telemetry.load(both).sum(-1), np.ones(2), "elementwise")
    summary = telemetry.summarise(both)
    wanted = {
        "load_balance": (1.0 + 3.0) / 2,
        "load_balance_pooled": 6 * (16 * 14 + 16 * 2 + 4 * 4 * 2) / (48 * 24),
        "router_z": 0.0,
        "max_violation": 1.0,
        "max_violation_worst": 2.0,
        "min_violation": 0.5,
        "avg_violation": (0.0 + 4 / 3) / 2,
        "effective_experts": (6.0 + 2.0) / 2,
        "load_entropy": (1.0 + np.log(2) / np.log(6)) / 2,
        "router_entropy": 0.0,
        "dropped_fraction": 0.25,
        "dead_fraction": 4 / 12,
    }
    assert_close(summary, wanted, "elementwise")


def test_telemetry_of_a_uniform_router():
    summary = telemetry.summarise(statistics_of(np.zeros((TOKENS, EXPERTS))))
    assert_close(summary["router_entropy"], 1.0, "elementwise")
    assert_close(summary["load_balance"], 1.0, "elementwise")
