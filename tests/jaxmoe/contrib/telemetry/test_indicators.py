# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Indicators of instability against a model in numpy, on meshes and in micro-batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.telemetry.congestion import EVERY
from jaxmoe.contrib.telemetry.indicators import (
    mean_cosine,
    observe_branch,
    summarise_indicators,
    token_means,
    unit_rows,
)
from jaxmoe.contrib.telemetry.step import coupled_directions, update_ratios, watch_layers
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ForwardMultipliers, ModelConfig, MoEConfig
from jaxmoe.models.transformer import forward, initial_router_state
from jaxmoe.routing import CosineTopKConfig, ExpertChoiceConfig, SoftmaxGateConfig, SoftMoEConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from sharding.distributed import global_batch
from tests.support.meshes import MESHES, mesh_named
from tests.support.models import ATTENTION, BATCH, LENGTH, TINY
from tests.support.one_step import SGD, batch, params_of
from tests.support.tolerances import assert_close

MODEL = ModelConfig(
    vocab_size=32,
    num_layers=3,
    embed_dim=16,
    attention=dataclasses.replace(ATTENTION, softcap=4.0),
    moe=MoEConfig(num_experts=4, top_k=3, expert_dim=10, balancers=()),
    dense_layers=(0,),
    dense_dim=24,
    multipliers=ForwardMultipliers(residual=0.5, logits=1.5),
)
"""A dense layer before two MoE layers, grouped queries, QK-norm, a cap and a multiplier."""
DETAILED = ExecutionConfig(telemetry="detailed")
UPDATES = {f"update_ratio/{name}" for name in ("embedding", "head", "final_norm", "norm")} | {
    f"update_ratio/{role}"
    for role in ("attention_in", "attention_out", "router", "expert_in", "expert_out")
}


# The oracle: one layer after the other, in float64.


def norm(x, gain):
    return gain * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def turned(heads):
    """RoPE [B S N H] as a rotation in the complex plane."""
    half = heads.shape[-1] // 2
    frequencies = 10_000.0 ** (-2.0 * np.arange(half) / heads.shape[-1])
    turn = np.exp(1j * np.arange(heads.shape[1])[:, None] * frequencies)[None, :, None]
    both = (heads[..., :half] + 1j * heads[..., half:]) * turn
    return np.concatenate([both.real, both.imag], axis=-1)


def logsumexp(x):
    top = x.max(-1, keepdims=True)
    return (np.log(np.exp(x - top).sum(-1, keepdims=True)) + top)[..., 0]


def swiglu(x, gate_up, down):
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    return (gate / (1.0 + np.exp(-gate)) * up) @ down


def attention(p, x, segments, found, real):
    q, k, v = (np.einsum("bsd,dnh->bsnh", x, p[name]) for name in ("q", "k", "v"))
    q, k = turned(norm(q, p["q_norm"])), turned(norm(k, p["k_norm"]))
    k, v = (np.repeat(heads, q.shape[2] // k.shape[2], axis=2) for heads in (k, v))
    logits = 4.0 * np.tanh(np.einsum("bsnh,bunh->bnsu", q, k) / np.sqrt(q.shape[-1]) / 4.0)
    sees = np.tril(np.ones((LENGTH, LENGTH), bool)) & (segments[:, :, None] == segments[:, None])
    logits = np.where(sees[:, None], logits, -np.inf)
    lse = logsumexp(logits)
    found["attention_z"] = np.mean((lse**2).mean(1)[real])
    found["attention_max_logit"] = logits.max((1, 3))[real].max()
    return np.einsum("bnsu,bunh,nhd->bsd", np.exp(logits - lse[..., None]), v, p["o"])


def mixture(p, x, found, real):
    logits = x @ p["router"]["weight"]
    found["router_z"] = np.mean(logsumexp(logits)[real] ** 2)
    found["router_max_logit"] = logits[real].max()
    chosen = np.argsort(-logits, axis=-1)[..., :3]
    experts = p["experts"]
    outputs = np.stack(
        [
            swiglu(x, gate_up, down)
            for gate_up, down in zip(experts["gate_up"], experts["down"], strict=True)
        ],
        axis=2,
    )
    outputs = np.take_along_axis(outputs, chosen[..., None], axis=2)
    gates = np.take_along_axis(logits, chosen, axis=-1)
    gates = np.exp(gates) / np.exp(gates).sum(-1, keepdims=True)
    unit = outputs / np.linalg.norm(outputs, axis=-1, keepdims=True)
    cosines = np.einsum("bsid,bsjd->bsij", unit, unit)[real]
    found["expert_correlation"] = np.mean(cosines[:, ~np.eye(3, dtype=bool)])
    norms = np.linalg.norm(np.einsum("sd,edf->sef", x[0], experts["gate_up"][:, :, 0]), axis=-1)
    of_experts = [np.corrcoef(a, b)[0, 1] for a, b in zip(logits[0].T, norms.T, strict=True)]
    found["activation_correlation"] = np.mean(of_experts)
    return (outputs * gates[..., None]).sum(2) * real[..., None]


def branch(name, h, found, real):
    h = h[real]
    found[f"{name}_rms"] = np.sqrt(np.mean(h**2))
    found[f"{name}_rms_scaled"] = 0.5 * np.sqrt(np.mean(h**2))
    far = np.abs(h - h.mean(-1, keepdims=True)) > 5.0 * h.std(-1, ddof=1, keepdims=True)
    found[f"{name}_outliers"] = far.mean()


def oracle(params, rows):
    """Indicators by name, [L] each; NaN where a layer has none."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    real, layers = rows.segment_ids != 0, []
    x = params["embedding"]["weight"][rows.tokens]
    for layer in range(3):
        stack, index = ("dense_blocks_0", 0) if layer == 0 else ("moe_blocks_1", layer - 1)
        p = jax.tree.map(lambda leaf, i=index: leaf[i], params[stack])
        found = {}
        h = norm(x, p["attention_norm"]["gain"])
        h = attention(p["attention"], h, rows.segment_ids, found, real)
        branch("attention", h, found, real)
        x = x + 0.5 * h
        h = norm(x, p["feed_forward_norm"]["gain"])
        if layer == 0:
            h = swiglu(h, p["feed_forward"]["gate_up"], p["feed_forward"]["down"])
        else:
            h = mixture(p["moe"], h, found, real)
        branch("feed_forward", h, found, real)
        x = x + 0.5 * h
        layers.append(found)
    names = layers[-1]
    wanted = {n: np.array([layer.get(n, np.nan) for layer in layers]) for n in names}
    counted = rows.loss_weights > 0
    logits = 1.5 * norm(x, params["final_norm"]["gain"]) @ params["head"]["weight"]
    wanted["head_z"] = np.array([np.mean(logsumexp(logits)[counted] ** 2)])
    wanted["head_max_logit"] = np.array([logits[counted].max()])
    wanted["direction_coupling"] = np.array([np.nan, *map(directions_of, moe_layers(params))])
    return wanted


def moe_layers(params):
    """Return the parameters of the MoE layers, one after the other."""
    stack = params["moe_blocks_1"]["moe"]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(2)]


def directions_of(moe):
    """Return the mean cosine of router rows and their experts' mean gate neurons."""
    rows, gates = moe["router"]["weight"].T, moe["experts"]["gate_up"][:, :, 0].mean(-1)
    lengths = np.linalg.norm(rows, axis=-1) * np.linalg.norm(gates, axis=-1)
    return ((rows * gates).sum(-1) / lengths).mean()


def one_step(model, *, parts=1, mesh=None, **execution):
    """Indicators of one step of SGD, and the parameters before and after it."""
    params = params_of(model)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=jax.tree.map(jnp.array, params),
        opt_state=SGD.init(params),
        router_state=initial_router_state(model),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )
    config = dataclasses.replace(DETAILED, **execution)
    if mesh is not None:
        config = dataclasses.replace(config, mesh=MESHES[mesh])
    step = make_train_step(model, SGD, execution=config, accumulation=parts, clip=None)
    if mesh is None:
        state, metrics = step(state, batch())
    else:
        with jax.set_mesh(mesh_named(mesh)):
            placed = jax.device_put(state, jax.sharding.NamedSharding(mesh_named(mesh), jax.P()))
            state, metrics = step(placed, global_batch(batch(), mesh_named(mesh)))
    return jax.device_get((metrics.measures["indicators"], params, state.params))


@functools.cache
def plain_step():
    return one_step(MODEL)


@pytest.mark.slow
def test_equal_the_oracle():
    indicators, params, _ = plain_step()
    wanted = oracle(params, batch())
    ours = {name: value for name, value in indicators.items() if "update" not in name}
    assert set(indicators) - set(ours) == UPDATES | {"update_ratio/mlp_in", "update_ratio/mlp_out"}
    assert np.isnan(ours["router_z"][0]) and np.isfinite(ours["router_z"][1:]).all()
    assert_close(ours, wanted, "end_to_end")
    assert (np.abs(wanted["expert_correlation"][1:]) > 1e-3).all()


@pytest.mark.slow
def test_updates_over_weights():
    indicators, old, new = plain_step()
    moved = jax.tree.map(lambda before, after: np.asarray(after) - before, old, new)

    def ratio(*path, layer=None):
        values = []
        for tree in (moved, old):
            for name in path:
                tree = tree[name]
            values.append(np.linalg.norm(np.asarray(tree if layer is None else tree[layer])))
        return values[0] / values[1]

    router = [ratio("moe_blocks_1", "moe", "router", "weight", layer=i) for i in (0, 1)]
    down = [ratio("moe_blocks_1", "moe", "experts", "down", layer=i) for i in (0, 1)]
    wanted = {
        "router": np.array([np.nan, *router]),
        "expert_out": np.array([np.nan, *down]),
        "mlp_in": np.array([ratio("dense_blocks_0", "feed_forward", "gate_up"), np.nan, np.nan]),
        "embedding": np.array([ratio("embedding", "weight")]),
        "final_norm": np.array([ratio("final_norm", "gain")]),
    }
    ours = {name: indicators[f"update_ratio/{name}"] for name in wanted}
    # The differences of the parameters carry the rounding of the parameters.
    for name, value in wanted.items():
        np.testing.assert_allclose(ours[name], value, rtol=2e-4, err_msg=name)


def test_updates_of_a_role_are_taken_together():
    table = parameter_table(TINY)
    params = table.tree(lambda row: jnp.ones(row.shape, jnp.float32))
    updates = table.tree(
        lambda row: jnp.full(row.shape, 3.0 if row.path.endswith("/q") else 0.0, jnp.float32)
    )
    params["head"]["weight"] *= 0.0
    ratios = jax.jit(functools.partial(update_ratios, table, TINY))(updates, params)
    # q has 4 heads, k and v have 2 each: half of the numbers move by three times their size.
    assert_close(ratios["update_ratio/attention_in"], np.full(2, 3 * 0.5**0.5), "elementwise")
    assert_close(ratios["update_ratio/embedding"], np.zeros(1), "elementwise")
    assert np.isnan(ratios["update_ratio/head"]).all()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            {"mesh": "data4_tensor2", "parts": 2, "remat": "full", "loss_chunk": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param({"parts": 4, "remat": "full"}, marks=pytest.mark.large),
        pytest.param({"mesh": "data4_tensor2", "parts": 2}, marks=pytest.mark.large),
    ],
    ids=["all_at_once", "micro_batches_recomputed", "mesh_and_micro_batches"],
)
def test_the_same_however_it_is_computed(case):
    assert_close(one_step(MODEL, **case)[0], plain_step()[0], "end_to_end")


def test_padding_counts_nowhere():
    """Other tokens in its place change nothing."""
    rows, params = batch(), params_of(MODEL)
    other = np.where(rows.segment_ids == 0, 31 - rows.tokens, rows.tokens)

    @jax.jit
    def observe(tokens):
        output = forward(MODEL, DETAILED, params, tokens, segment_ids=jnp.asarray(rows.segment_ids))
        return summarise_indicators(output.observations, residual_multiplier=0.5)

    assert_close(observe(jnp.asarray(other)), observe(jnp.asarray(rows.tokens)), "elementwise")


def test_brief_computes_none_of_it():
    shapes = jax.eval_shape(lambda: params_of(MODEL))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)

    def lines(execution):
        def output(params, tokens):
            return forward(MODEL, execution, params, tokens, has_logits=False)

        return len(jax.jit(output).lower(shapes, tokens).as_text().splitlines())

    assert lines(DETAILED) > 1.2 * lines(ExecutionConfig())
    output = jax.eval_shape(functools.partial(forward, MODEL, ExecutionConfig()), shapes, tokens)
    assert output.observations is None


def test_they_have_no_gradient():
    tokens = jnp.asarray(batch().tokens)

    def total(params):
        output = forward(MODEL, DETAILED, params, tokens)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(output.observations.sums))

    slopes = jax.jit(jax.grad(total))(params_of(MODEL))
    assert all((np.asarray(leaf) == 0.0).all() for leaf in jax.tree.leaves(slopes))


def with_moe(**parts):
    causal = dataclasses.replace(TINY.attention, is_causal=False)
    return dataclasses.replace(TINY, attention=causal, moe=dataclasses.replace(TINY.moe, **parts))


NO_PAIRS = {
    "one_expert": with_moe(top_k=1),
    "slots": with_moe(router=SoftMoEConfig(), balancers=(), gate=SoftmaxGateConfig()),
}


@pytest.mark.parametrize("model", NO_PAIRS.values(), ids=NO_PAIRS)
def test_without_pairs_there_is_no_correlation(model):
    observe = functools.partial(forward, model, DETAILED)
    output = jax.eval_shape(observe, params_of(model), jnp.asarray(batch().tokens))
    assert "expert_correlation" not in output.observations.sums
    assert "router_z" in output.observations.sums


def test_correlation_where_experts_choose():
    """Tokens have none, one or more experts, and only those with a pair count."""
    model = with_moe(router=ExpertChoiceConfig(), balancers=(), gate=SoftmaxGateConfig())
    params = params_of(model)
    # Equal experts: all their outputs for a token point the same way.
    experts = params["moe_blocks_0"]["moe"]["experts"]
    same = jax.tree.map(lambda w: jnp.broadcast_to(w[:, :1], w.shape), experts)
    params = jax.tree.map(jnp.array, params)
    params["moe_blocks_0"]["moe"]["experts"] = same
    observe = jax.jit(lambda params, rows: forward(model, DETAILED, params, rows).observations)
    found = observe(params, jnp.asarray(batch().tokens))
    count = np.asarray(found.counts["expert_correlation"])
    assert ((0 < count) & (count < BATCH * LENGTH)).all()
    assert_close(found.sums["expert_correlation"], count, "matmul")


# The parts.


def test_outliers_against_numpy():
    rng = np.random.default_rng(0)
    h = rng.standard_normal((2, 3, 256)).astype(np.float32)
    h[0, 0, :3], h[1, 2, 7] = 40.0, -60.0
    mask = np.array([[True, True, True], [True, True, False]])
    found = observe_branch("x", jnp.asarray(h), jnp.asarray(mask))
    ours = summarise_indicators(found, residual_multiplier=2.0)
    assert_close(ours["x_outliers"], np.float32(3 / 256 / 5), "elementwise")
    size = np.sqrt(np.mean(h[mask] ** 2))
    assert_close((ours["x_rms"], ours["x_rms_scaled"]), (size, 2 * size), "matmul")


def test_a_constant_row_has_no_outliers():
    found = observe_branch("x", jnp.full((1, 2, 8), 3.0), jnp.ones((1, 2), bool))
    assert float(found.sums["x_outliers"]) == 0.0


def test_mean_cosine_against_pairs():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((4, 3, 5)) + 0.5
    kept = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]], float)
    unit = np.asarray(unit_rows(jnp.asarray(rows.reshape(12, 5), jnp.float32))).reshape(4, 3, 5)
    wanted = []
    for token in range(4):
        mine = [u for u, k in zip(unit[token], kept[token], strict=True) if k]
        pairs = [a @ b for i, a in enumerate(mine) for j, b in enumerate(mine) if i != j]
        wanted.append(np.mean(pairs) if pairs else 0.0)
    total = jnp.asarray((unit * kept[..., None]).sum(1))
    mean, has_pair = mean_cosine(total, jnp.asarray(kept.sum(1), jnp.float32))
    assert_close(mean, np.array(wanted), "matmul")
    assert has_pair.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_rows_of_zeros_stay_zeros():
    assert (np.asarray(unit_rows(jnp.zeros((2, 3), jnp.bfloat16))) == 0.0).all()


def test_no_token_is_nan_and_no_warning():
    nothing = token_means(
        {"x_rms": jnp.ones((1, 2))}, jnp.zeros((1, 2), bool), peaks={"y": jnp.ones((1, 2))}
    )
    ours = summarise_indicators(nothing, residual_multiplier=1.0)
    assert all(np.isnan(value) for value in ours.values())
    some = token_means(
        {"x_rms": jnp.ones((1, 2))}, jnp.ones((1, 2), bool), peaks={"y": -jnp.ones((1, 2))}
    )
    both = summarise_indicators(nothing + some, residual_multiplier=1.0)
    assert_close(both, {"x_rms": 1.0, "x_rms_scaled": 1.0, "y": -1.0}, "elementwise")


def test_a_refused_step_moves_nothing():
    params = params_of(TINY)
    moved = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan), params)
    nothing = token_means({}, jnp.ones((1, 2), bool))
    watch = jax.jit(functools.partial(watch_layers, TINY, placement=DETAILED.placement))
    ratios = watch(nothing, moved, params, jnp.zeros((), bool), step=jnp.int32(0))
    assert (ratios["update_ratio/expert_in"] == 0.0).all()


def coupled(model, params, step):
    table = parameter_table(model)
    return coupled_directions(table, model, params, DETAILED.placement, step=jnp.int32(step))


def test_coupling_of_weights_is_computed_in_every_tenth_step():
    params = params_of(MODEL)
    watch = jax.jit(functools.partial(coupled, MODEL))
    found = {step: watch(params, step)["direction_coupling"] for step in (0, 1, EVERY - 1, EVERY)}
    assert np.isnan(found[1]).all() and np.isnan(found[EVERY - 1]).all()
    wanted = np.array([np.nan, *map(directions_of, moe_layers(params))])
    for step in (0, EVERY):
        assert_close(found[step], wanted, "matmul")


def test_routers_without_a_row_for_each_expert_have_no_coupling():
    """Slots have several rows for each expert, cosine routers compare in another space."""
    soft = NO_PAIRS["slots"]
    cosine = with_moe(router=CosineTopKConfig(router_dim=3))
    for model in (soft, cosine):
        assert jax.eval_shape(lambda m=model: coupled(m, params_of(m), 0)) == {}
    plain = jax.eval_shape(lambda: coupled(MODEL, params_of(MODEL), 0))
    assert plain["direction_coupling"].shape == (3,)
