# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The MoE layer for other people's models against a loop over tokens, in value and gradient: the
Linen module, the NNX module and the functions, on one device and on meshes of the user's own."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, traverse_util
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmoe
import jaxmoe.nnx
from jaxmoe import MoEConfig, parts
from jaxmoe.parts import combine, dispatch, experts, route
from jaxmoe.routing import (
    ROUTERS,
    LoadBalanceConfig,
    LossFreeConfig,
    RouterZConfig,
    SigmoidTopKConfig,
)
from sharding import MeshConfig, make_mesh
from sharding.expert_parallel import AllToAllConfig, ExpertAxes, expert_parallel

B, S, D, E, K, F = 8, 2, 6, 4, 2, 5
MOE = jaxmoe.MoE(num_experts=E, top_k=K, expert_dim=F)
CONFIG = MoEConfig(num_experts=E, top_k=K, expert_dim=F)
X = jax.random.normal(jax.random.key(1), (B, S, D))


@functools.cache
def params():
    return jax.jit(MOE.init)(jax.random.key(0), X)["params"]


def plain_moe(params, x, chosen):
    """The layer as a loop over tokens and their experts.

    Args:
        params: Parameters of the layer.
        x: [T D].
        chosen: K experts of each token, in numpy.

    Returns:
        The output [T D], and the sum of both losses.
    """
    logits = x @ params["router"]["weight"]

    def token_output(token):
        row, ids, scores = token
        scores = jnp.exp(scores)[ids]
        output = jnp.zeros_like(row)
        for k in range(K):
            matrix = params["experts"]["gate_up"][ids[k]]
            hidden = jax.nn.silu(row @ matrix[:, 0]) * (row @ matrix[:, 1])
            output += scores[k] / scores.sum() * (hidden @ params["experts"]["down"][ids[k]])
        return output

    output = jax.lax.map(token_output, (x, jnp.asarray(chosen), logits))
    share = np.bincount(chosen.reshape(-1), minlength=E).astype(np.float32) / chosen.size
    mean = jax.nn.softmax(logits).mean(0)
    balance = LoadBalanceConfig().coefficient * E * jnp.sum(jnp.asarray(share) * mean)
    z = RouterZConfig().coefficient * jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return output, balance + z


def loss_of(y, loss):
    """A number that depends on every output in another way."""
    weights = jnp.arange(1.0, y.size + 1, dtype=jnp.float32).reshape(y.shape)
    return jnp.sum(y * weights) / y.size + loss


@functools.cache
def expected():
    """Value and gradients of `loss_of` of the loop."""
    x = X.reshape(-1, D)
    chosen = np.argsort(-np.asarray(x @ params()["router"]["weight"]), axis=-1)[:, :K]

    def loss(params, x):
        return loss_of(*plain_moe(params, x.reshape(-1, D), chosen))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params(), X)


def check(result):
    """Compare value and gradients with the loop's."""
    result = jax.tree.map(np.asarray, result)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-4, 2e-6), result, expected())


def module_loss(module, params, x):
    y, aux = module.apply({"params": params}, x)
    np.testing.assert_equal(y.shape, x.shape)
    return loss_of(y, aux.loss)


def on_mesh(mesh, module, *, expert, batch):
    """Value and gradients on a mesh, experts cut over one of its axes and rows over some."""
    with jax.set_mesh(mesh):
        placed = {
            part: jax.device_put(
                arrays, NamedSharding(mesh, PartitionSpec(expert if part == "experts" else None))
            )
            for part, arrays in params().items()
        }
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(batch)))
        loss = functools.partial(module_loss, module)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(placed, x)


def own_mesh(kind):
    return jax.make_mesh((2, 4), ("rows", "cols"), axis_types=(kind,) * 2)


def test_the_linen_module_equals_a_loop_over_tokens():
    check(jax.jit(jax.value_and_grad(functools.partial(module_loss, MOE), (0, 1)))(params(), X))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_it_equals_the_loop_on_a_mesh_of_the_users_own(kind):
    check(on_mesh(own_mesh(kind), MOE, expert="cols", batch=("rows",)))


def test_it_equals_the_loop_with_experts_spread_over_a_mesh_of_make_mesh():
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    module = MOE.clone(dispatcher="all_to_all")
    check(on_mesh(mesh, module, expert="expert", batch=("data", "expert")))


def test_the_functions_equal_the_loop():
    def loss(params, x):
        tokens = x.reshape(-1, D)
        assignments, aux = route(CONFIG, params["router"], tokens)
        rows, order = dispatch(tokens, assignments, E)
        outputs = experts(params["experts"], rows, order.group_sizes)
        return loss_of(combine(outputs, assignments, order), aux.loss)

    check(jax.jit(jax.value_and_grad(loss, (0, 1)))(params(), X))


def test_the_functions_spread_experts_over_an_axis_of_the_users_own():
    axes = ("rows", "cols")

    def layer(params, x):
        tokens = x.reshape(-1, D)
        assignments, aux = route(CONFIG, params["router"], tokens, batch_axes=axes)
        y, _ = expert_parallel(
            tokens,
            assignments,
            experts,
            params["experts"],
            num_experts=E,
            config=AllToAllConfig(),
            axes=ExpertAxes(expert=("cols",)),
        )
        return y.reshape(x.shape), aux

    def loss(params, x):
        specs = {"router": PartitionSpec(), "experts": PartitionSpec("cols")}
        spread = jax.shard_map(
            layer,
            in_specs=(specs, PartitionSpec(axes)),
            out_specs=(PartitionSpec(axes), PartitionSpec()),
        )
        y, aux = spread(params, x)
        return loss_of(y, aux.loss)

    with jax.set_mesh(own_mesh(AxisType.Auto)):
        check(jax.jit(jax.value_and_grad(loss, (0, 1)))(params(), X))


def test_the_nnx_module_equals_the_loop_and_trains():
    module = jaxmoe.nnx.MoE(D, num_experts=E, top_k=K, expert_dim=F, rngs=nnx.Rngs(0))
    for part, arrays in params().items():
        for name, array in arrays.items():
            getattr(module, part)[name].set_value(array)

    def loss(module):
        y, aux = module(X)
        return loss_of(y, aux.loss)

    optimizer = nnx.Optimizer(module, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value, grads

    value, grads = step(module, optimizer)
    loop_value, (loop_grads, _) = expected()
    np.testing.assert_allclose(value, loop_value, 2e-4)
    compare = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6)
    jax.tree.map(compare, nnx.to_pure_dict(grads), jax.device_get(loop_grads))
    assert step(module, optimizer)[0] < value


def test_parameters_are_plain_arrays_and_need_no_name_of_ours():
    shapes = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(params()).items()}
    assert shapes == {
        ("router", "weight"): (D, E),
        ("experts", "gate_up"): (E, D, 2, F),
        ("experts", "down"): (E, F, D),
    }
    assert all(type(leaf) is type(X) for leaf in traverse_util.flatten_dict(params()).values())


def test_it_stands_in_a_model_of_linen_and_in_its_transformations():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(jaxmoe.MoE),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return layers(config=CONFIG, name="moe")(x)

    shapes = jax.eval_shape(Stack().init, jax.random.key(0), X)["params"]["moe"]
    assert shapes["experts"]["down"].shape == (2, E, F, D)
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), {"moe": shapes})
    _, aux = jax.eval_shape(Stack().apply, {"params": variables}, X)
    assert aux.loss.shape == (2,) and aux.load.shape == (2, E)


def test_aux_has_each_loss_by_name_and_the_load():
    rounded = X.astype(jnp.bfloat16)
    y, aux = jax.jit(MOE.apply)({"params": params()}, rounded)
    assert y.dtype == jnp.bfloat16 and set(aux.losses) == {"load_balance", "router_z"}
    np.testing.assert_allclose(aux.loss, sum(aux.losses.values()), rtol=1e-6)
    ids = np.argsort(-np.asarray(rounded.astype(jnp.float32) @ params()["router"]["weight"]), -1)
    counts = np.bincount(ids[..., :K].reshape(-1), minlength=E)
    np.testing.assert_allclose(aux.load, counts / counts.sum(), rtol=1e-6)
    assert aux.dropped == 0


def test_padding_gets_nothing_and_counts_nowhere():
    mask = jnp.arange(S)[None, :] < jnp.asarray([S] * (B - 1) + [1])[:, None]
    y, aux = jax.jit(MOE.apply)({"params": params()}, X, token_mask=mask)
    assert not y[-1, 1].any() and y[-1, 0].any()
    tokens = X.reshape(-1, D)[:-1]
    _, shorter = jax.jit(MOE.apply)({"params": params()}, tokens)
    np.testing.assert_allclose(aux.loss, shorter.loss, rtol=1e-6)
    np.testing.assert_allclose(aux.load, shorter.load, rtol=1e-6)


def test_the_state_of_a_router_is_updated_as_batch_statistics_are():
    bias = LossFreeConfig()
    module = MOE.clone(router=SigmoidTopKConfig(bias=bias), balancers=())
    variables = module.init(jax.random.key(0), X)
    start = variables["router_state"]["routing"]
    apply = jax.jit(module.apply, static_argnames=("train", "mutable"))
    (_, aux), updated = apply(variables, X, train=True, mutable=("router_state",))
    state = updated["router_state"]["routing"]
    assert state["step"] == 1 and start["step"] == 0
    moved = np.asarray(jax.tree.leaves(state["state"])[0] - jax.tree.leaves(start["state"])[0])
    assert (np.sign(moved) == np.sign(1 / E - np.asarray(aux.load))).all()
    apply(variables, X)  # evaluation needs no mutable collection


def test_the_state_of_a_router_is_updated_in_nnx():
    options = {"router": SigmoidTopKConfig(bias=LossFreeConfig()), "balancers": ()}
    options |= {"num_experts": E, "top_k": K, "expert_dim": F}
    module = jaxmoe.nnx.MoE(D, rngs=nnx.Rngs(0), **options)

    @nnx.jit
    def step(module):
        return nnx.value_and_grad(lambda module: module(X**2, train=True)[0].sum())(module)[0]

    step(module)
    step(module)
    state = nnx.to_pure_dict(nnx.state(module))["routing"]
    assert state["step"] == 2 and state["state"]["bias"].any()


def _refusal(router):
    try:
        module = jaxmoe.MoE(num_experts=E, top_k=K, expert_dim=F, router=router)
        tokens = jnp.zeros((B, S), jnp.int32)
        init = functools.partial(module.init_with_output, train=True)
        (_, aux), _ = jax.eval_shape(init, jax.random.key(0), X, tokens=tokens)
        assert aux.load.shape == (E,)
    except ValueError as error:
        return str(error)
    return None


def test_every_router_by_its_name_works_or_is_refused_in_words():
    refusals = {router: text for router in ROUTERS if (text := _refusal(router))}
    assert set(refusals) <= {"moe_plus_plus", "prototype"}, refusals
    assert "take another router, or jaxmoe.Transformer" in refusals["moe_plus_plus"]


@pytest.mark.parametrize(
    ("options", "x", "text"),
    [
        ({"router": "sigmoid"}, X, "there is no router 'sigmoid': did you mean 'sigmoid_topk'?"),
        ({"config": CONFIG, "top_k": 3}, X, "says top_k twice"),
        ({}, X.astype(jnp.float16), "set dtype='bfloat16' or 'float32'"),
        ({"dtype": "int8"}, X, "and dtype is int8"),
        ({}, X[0, 0], "needs x [B S D] or [S D], not (6,)"),
        ({"dispatcher": "all2all"}, X, "there is no dispatcher 'all2all'"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(options, x, text):
    module = jaxmoe.MoE(**({"expert_dim": F} | options))
    with pytest.raises(ValueError, match=re.escape(text)):
        jax.eval_shape(module.init, jax.random.key(0), x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_dispatcher_says_which_mesh_it_needs(kind):
    module = jaxmoe.MoE(expert_dim=F, dispatcher="all_to_all")
    with jax.set_mesh(own_mesh(kind)), pytest.raises(ValueError, match="the current mesh has the"):
        jax.eval_shape(module.init, jax.random.key(0), X)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (X[0], "MoE needs x [B S D], not (2, 6)"),
        (X[:3], "the dimension 3 of x (3, 2, 6) must be divisible by the 4 devices"),
        (X[:, :1], "must be divisible by the 2 devices of the mesh axes seq, tensor"),
    ],
)
def test_a_mesh_that_does_not_divide_the_activations_says_so(x, text):
    mesh = make_mesh(MeshConfig(data=4, seq=2))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(text)):
        jax.eval_shape(MOE.init, jax.random.key(0), x)


def test_the_functions_refuse_what_has_no_rows():
    config = MoEConfig(router=ROUTERS["soft_moe"](), gate=_softmax(), balancers=())
    with pytest.raises(ValueError, match="router soft_moe.*: use the module"):
        route(config, {}, X[0])
    tokens = MoEConfig(router=ROUTERS["expert_choice"](), gate=_softmax(), balancers=())
    assignments, _ = route(tokens, {"weight": jnp.zeros((D, 8))}, X.reshape(-1, D))
    rows, order = dispatch(X.reshape(-1, D), assignments, 8)
    with pytest.raises(ValueError, match="num_tokens=x.shape"):
        combine(rows, assignments, order)


def _softmax():
    return parts.choice("gate", "softmax")()
