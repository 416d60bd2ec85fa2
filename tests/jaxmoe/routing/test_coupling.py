# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The expert-router coupling loss: proxies, zeros, what it does and does not depend on."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import MoEConfig
from jaxmoe.models.transformer import forward
from jaxmoe.routing import CouplingConfig, KMeansConfig, SoftmaxTopKConfig, ZeroComputationConfig
from jaxmoe.routing.balancers.coupling import coupling_loss, proxy_rows, response_norms
from jaxmoe.scaling.initialize import init_params
from sharding import MeshConfig, make_mesh
from tests.support.models import TINY, tokens_for
from tests.support.tolerances import assert_close

WIDTH, EXPERTS, HIDDEN = 7, 5, 3


def weights(seed, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    router = {"weight": jnp.asarray(rng.normal(size=(WIDTH, experts)), jnp.float32)}
    gate_up = jnp.asarray(rng.normal(size=(experts, WIDTH, 2, HIDDEN)), jnp.float32)
    return router, {"gate_up": gate_up, "down": jnp.zeros((experts, HIDDEN, WIDTH))}


@pytest.mark.parametrize("seed", range(4))
def test_proxies_stay_nearest_to_their_own_row(seed):
    """A proxy is never nearer to another row than to its own."""
    rows = weights(seed)[0]["weight"].T
    draw = jax.jit(jax.vmap(lambda key: proxy_rows(rows, key)))
    proxies = np.asarray(draw(jax.random.split(jax.random.key(seed), 200)))
    rows = np.asarray(rows)
    apart = np.linalg.norm(rows[:, None] - rows[None], axis=-1)
    radius = (apart + np.diag(np.full(EXPERTS, np.inf))).min(1) / 2
    moved = np.linalg.norm(proxies - rows, axis=-1)
    assert (moved <= radius * (1 + 1e-6)).all() and moved.max() > 0.3 * radius.min()
    distances = np.linalg.norm(proxies[:, :, None] - rows[None, None], axis=-1)
    assert (distances.argmin(-1) == np.arange(EXPERTS)).all()


def plain_loss(norms, alpha):
    number, loss = len(norms), 0.0
    for i in range(number):
        for j in range(number):
            if i != j:
                loss += max(norms[i, j] - alpha * norms[i, i], 0.0)
                loss += max(norms[j, i] - alpha * norms[i, i], 0.0)
    return loss / number**2


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_against_loops(alpha):
    router, experts = weights(1)
    key = jax.random.key(0)
    ours = CouplingConfig(coefficient=2.0, alpha=alpha).coupling(router, experts, key)
    proxies = np.asarray(proxy_rows(router["weight"].T, jax.random.fold_in(key, 2**32 - 1)))
    gate = np.asarray(experts["gate_up"])[:, :, 0]
    norms = np.array([[np.linalg.norm(p @ g) for g in gate] for p in proxies])
    assert_close(ours, 2.0 * plain_loss(norms, alpha), "matmul")


def test_loss_is_zero_for_experts_that_read_only_their_row():
    """Each expert reads only the direction of its own router row."""
    router = {"weight": jnp.eye(WIDTH, EXPERTS)}
    gate = jnp.zeros((EXPERTS, WIDTH, 2, HIDDEN))
    for expert in range(EXPERTS):
        gate = gate.at[expert, expert, 0].set(1.0)
    experts = {"gate_up": gate}
    assert CouplingConfig(alpha=0.1).coupling(router, experts, jax.random.key(0)) <= 1e-6
    norms = jnp.full((EXPERTS, EXPERTS), 0.5).at[jnp.diag_indices(EXPERTS)].set(1.0)
    assert coupling_loss(norms, 0.5) == 0.0 < coupling_loss(norms, 0.4)


def test_a_smaller_alpha_is_stricter():
    router, experts = weights(2)
    losses = [
        float(CouplingConfig(alpha=alpha).coupling(router, experts, jax.random.key(1)))
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert (np.diff(losses) < 0).all()


def test_gradients_reach_only_router_and_gate_projections():
    router, experts = weights(3)
    loss = lambda *given: CouplingConfig().coupling(*given, jax.random.key(2))  # noqa: E731
    by_router, by_experts = jax.grad(loss, argnums=(0, 1))(router, experts)
    gate_up = np.asarray(by_experts["gate_up"])
    assert np.abs(by_router["weight"]).max() > 0.0 < np.abs(gate_up[:, :, 0]).max()
    assert not gate_up[:, :, 1].any() and not by_experts["down"].any()


def test_epsilon_carries_no_gradient():
    """The slope in a row is that of a fixed factor per entry."""
    rows, key = weights(4)[0]["weight"].T, jax.random.key(3)
    factor = proxy_rows(rows, key) / rows
    slope = jax.grad(lambda r: proxy_rows(r, key).sum())(rows)
    assert_close(slope, factor, "matmul")


@pytest.mark.parametrize("case", ["one expert", "zero router", "zero gates", "equal rows"])
def test_degenerate_weights_stay_finite(case):
    router, experts = weights(5, experts=1 if case == "one expert" else EXPERTS)
    if case in ("zero router", "equal rows"):
        router = jax.tree.map(lambda w: jnp.full_like(w, float(case == "equal rows")), router)
    if case == "zero gates":
        experts = jax.tree.map(jnp.zeros_like, experts)
    loss = lambda *given: CouplingConfig().coupling(*given, jax.random.key(0))  # noqa: E731
    value, gradient = jax.value_and_grad(loss, argnums=(0, 1))(router, experts)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, gradient)))
    if case == "one expert":
        assert value == 0.0


def test_experts_over_devices_equal_one_device():
    """Experts spread over devices: each column block by itself, then gathered, is the same."""
    router, experts = weights(6, experts=8)
    proxies = proxy_rows(router["weight"].T, jax.random.key(4))
    gate, mesh = experts["gate_up"][:, :, 0], jax.make_mesh((8,), ("expert",))
    spread = PartitionSpec("expert")
    columns = jax.shard_map(
        response_norms,
        mesh=mesh,
        in_specs=(PartitionSpec(), spread),
        out_specs=PartitionSpec(None, "expert"),
    )
    placed = jax.device_put(gate, jax.NamedSharding(mesh, spread))
    whole = response_norms(proxies, gate)
    assert_close(jax.jit(columns)(proxies, placed), whole, "elementwise")


MODEL = dataclasses.replace(
    TINY, moe=dataclasses.replace(TINY.moe, balancers=(CouplingConfig(coefficient=0.5),))
)


def coupling_of(params, tokens):
    output = forward(MODEL, ExecutionConfig(), params, tokens, train=True, key=jax.random.key(0))
    return output.losses["coupling"]


def coupling_and_gradient(params, tokens, mesh=None):
    run = jax.jit(jax.value_and_grad(coupling_of))
    if mesh is None:
        return run(params, tokens)
    with jax.set_mesh(mesh):
        return run(params, tokens)


@pytest.mark.slow
def test_loss_in_a_model_is_independent_of_batch_and_mesh():
    tokens, _ = tokens_for(MODEL)
    params = init_params(MODEL, jax.random.key(1))
    value, gradient = coupling_and_gradient(params, tokens)
    assert value > 0.0
    doubled = jnp.concatenate([tokens, tokens[::-1]])
    np.testing.assert_array_equal(jax.jit(coupling_of)(params, doubled), value)
    mesh = make_mesh(MeshConfig(data=2, expert=2), jax.devices()[:4])
    spread = init_params(MODEL, jax.random.key(1), mesh=mesh)
    assert_close(coupling_and_gradient(spread, tokens, mesh), (value, gradient), "end_to_end")


def test_no_loss_in_evaluation():
    def losses(key):
        tokens = jnp.zeros((1, 4), jnp.int32)
        return forward(MODEL, ExecutionConfig(), init_params(MODEL, key), tokens).losses

    assert jax.eval_shape(losses, jax.random.key(1)) == {}


def test_experts_without_computation_are_excluded():
    router, experts = weights(7, experts=EXPERTS + 2)
    computing = {"gate_up": experts["gate_up"][:EXPERTS]}
    value = CouplingConfig().coupling(router, computing, jax.random.key(0))
    proxies = proxy_rows(router["weight"].T, jax.random.fold_in(jax.random.key(0), 2**32 - 1))[
        :EXPERTS
    ]
    norms = response_norms(proxies, computing["gate_up"][:, :, 0])
    assert_close(value, plain_loss(np.asarray(norms), 1.0), "matmul")
    MoEConfig(balancers=(CouplingConfig(),), zero_computation=ZeroComputationConfig())


def test_refusals():
    text = (
        "moe.balancers=coupling compares the rows of the router's matrix `weight`, a column for"
        " each expert, and moe.router=kmeans has none: leave coupling out, or take a router that"
        " scores by one matrix (softmax_topk)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MoEConfig(router=KMeansConfig(), balancers=(CouplingConfig(),))
    MoEConfig(router=SoftmaxTopKConfig(), balancers=(CouplingConfig(),))
    with pytest.raises(ValueError, match=r"^alpha=1.5 of coupling must lie between 0 and 1$"):
        CouplingConfig(alpha=1.5)
    with pytest.raises(ValueError, match="draws random numbers in training: give `key`$"):
        CouplingConfig().coupling(*weights(0), None)
