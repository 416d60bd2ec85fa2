# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients do not depend on the mesh, beyond rounding.

One model without a mesh, in a mesh of the user's whose axes are Auto and have names of their own,
and on every Explicit mesh of the table with both rule sets; its MoE layer against the plainest one;
rematerialisation, padding and splitting of the batch.
"""

import dataclasses
import functools
import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmoe.execution import ExecutionConfig, Remat
from jaxmoe.layers.feed_forwards.moe import layer
from jaxmoe.layers.feed_forwards.moe.layer import MoELayer
from jaxmoe.layers.records import RoutingInputs
from jaxmoe.models.embedding import head_weight
from jaxmoe.models.transformer import Transformer
from jaxmoe.routing import GATES, CapacityConfig, SoftmaxTopKConfig, SqrtGateConfig
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig, make_mesh
from sharding.axes import BATCH_AXES
from sharding.distributed import global_batch
from sharding.sequence_parallel import RingConfig
from sharding.state_layouts import STATE_LAYOUTS
from tests.support import dense_moe
from tests.support.losses import summed_nll
from tests.support.meshes import LAYOUTS, MESHES, mesh_named
from tests.support.models import BATCH, FULL, LENGTH, TINY, tokens_for
from tests.support.tolerances import assert_close

MODEL = dataclasses.replace(
    TINY,
    attention=dataclasses.replace(TINY.attention, is_gated=True),
    moe=dataclasses.replace(TINY.moe, num_shared_experts=1, gate=SqrtGateConfig()),
)
"""Two MoE layers with shared experts, grouped queries, QK-norm and gated heads."""

ON_ONE = ExecutionConfig()


@functools.cache
def values_of(model):
    """Parameters of which none has the value of a fresh model, gains and router included."""

    @jax.jit
    def build():
        params = init_params(model, jax.random.key(0))
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(1), len(leaves))
        moved = [
            leaf * 2.0 + 0.1 * jax.random.normal(key, leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, moved)

    return build()


@functools.cache
def loss_and_gradients(model, execution):
    """`(params, batch) -> ((loss, aside), gradients)`, jitted; a batch is tokens, targets and
    optionally segment_ids."""

    def loss(params, batch):
        segment_ids = batch.get("segment_ids")
        output = Transformer(model, execution).apply(
            {"params": params}, batch["tokens"], segment_ids=segment_ids, has_logits=False
        )
        weight = head_weight(params, model)
        real = batch.get("segment_ids", jnp.ones_like(batch["tokens"])) != 0
        counted = real.astype(jnp.float32)
        total = summed_nll(
            output.hidden, weight, batch["targets"], counted, model=model, execution=execution
        )
        nll = total / counted.sum()
        aside = {"nll": nll, "losses": output.losses, "statistics": output.statistics}
        return nll + sum(output.losses.values()), aside

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def on_one_device(model):
    tokens, targets = tokens_for(model)
    batch = {"tokens": tokens, "targets": targets}
    return loss_and_gradients(model, ON_ONE)(values_of(model), batch)


def on_mesh(model, name, rules):
    mesh, table = mesh_named(name), parameter_table(model, rules=STATE_LAYOUTS[rules].parameters)
    places = table.tree(lambda row: NamedSharding(mesh, row.spec))
    params = jax.device_put(values_of(model), places)
    tokens, targets = map(np.asarray, tokens_for(model))
    batch = global_batch({"tokens": tokens, "targets": targets}, mesh)
    execution = ExecutionConfig(mesh=MESHES[name], rules=rules)
    with jax.set_mesh(mesh):
        return loss_and_gradients(model, execution)(params, batch)


IN_SHORT = [("data4_tensor2", "fully_sharded")]
CASES = [
    pytest.param(
        MODEL, *layout, id="-".join(layout), marks=() if layout in IN_SHORT else pytest.mark.slow
    )
    for layout in LAYOUTS
]
CASES += [
    pytest.param(
        FULL, "data4_tensor2", "fully_sharded", id="full-data4_tensor2", marks=pytest.mark.slow
    )
]


@pytest.mark.parametrize(("model", "mesh", "rules"), CASES)
def test_loss_and_gradients_equal_on_every_mesh(model, mesh, rules):
    """Losses, statistics and gradients; each gradient has the sharding of its parameter."""
    result = on_mesh(model, mesh, rules)
    assert_close(result, on_one_device(model), "end_to_end")
    specs = parameter_table(model, rules=STATE_LAYOUTS[rules].parameters).tree(lambda row: row.spec)
    assert jax.tree.map(lambda gradient: gradient.sharding.spec, result[1]) == specs


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data4_tensor2", "replica2_data2_expert2"])
def test_weights_gathered_in_halves_change_nothing(mesh, monkeypatch):
    """As TPU kernels read them; here the halves are joined behind the gather."""
    monkeypatch.setattr(layer, "reads_halves", lambda implementation: True)
    monkeypatch.setitem(globals(), "loss_and_gradients", loss_and_gradients.__wrapped__)
    result = on_mesh(MODEL, mesh, "fully_sharded")
    assert_close(result, on_one_device(MODEL), "end_to_end")


def test_loss_and_gradients_equal_in_a_user_auto_mesh():
    """A mesh with Auto axes fsdp and tp, which the library does not know."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)

    def spread(leaf):
        """The first dimension that divides goes to fsdp, the last to tp."""
        spec: list[str | None] = [None] * leaf.ndim
        for axis, dims in (("fsdp", range(leaf.ndim)), ("tp", reversed(range(leaf.ndim)))):
            free = [d for d in dims if leaf.shape[d] % mesh.shape[axis] == 0 and not spec[d]]
            if free:
                spec[free[0]] = axis
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    tokens, targets = tokens_for(MODEL)
    batch = jax.device_put(
        {"tokens": tokens, "targets": targets}, NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    params = jax.tree.map(spread, values_of(MODEL))
    with jax.set_mesh(mesh):
        result = loss_and_gradients(MODEL, ON_ONE)(params, batch)
    assert_close(result, on_one_device(MODEL), "end_to_end")


@pytest.mark.parametrize(
    "remat",
    [
        "full",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dots", "kernels", "attention")),
    ],
)
def test_loss_and_gradients_equal_under_remat(remat):
    """Statistics too: they are returned, so that recomputing a layer does not count it twice."""
    tokens, targets = tokens_for(MODEL)
    batch = {"tokens": tokens, "targets": targets}
    result = loss_and_gradients(MODEL, ExecutionConfig(remat=remat))(values_of(MODEL), batch)
    assert_close(result, on_one_device(MODEL), "end_to_end")
    counts = result[0][1]["statistics"].counts
    assert counts.sum(-1).tolist() == [BATCH * LENGTH * MODEL.moe.top_k] * 2


def test_each_remat_computes_its_products_again():
    """Queries, keys, values, gates of heads, output, shared experts, router: once each; attention:
    two for its scores and sums; routed experts: the first of their products."""
    tokens, targets = tokens_for(MODEL)
    batch = {"tokens": tokens, "targets": targets}

    def products(remat):
        function = loss_and_gradients(MODEL, ExecutionConfig(remat=remat))
        return function.lower(values_of(MODEL), batch).as_text().count("dot_general")

    least = products("none")
    again = {remat: products(remat) - least for remat in get_args(Remat)}
    expected = {"none": 0, "dots": 0, "kernels": 7, "attention": 8, "full": 10, "offload": 10}
    assert again == expected


@pytest.mark.slow
def test_attention_over_a_ring_is_sent_again_only_where_nothing_is_kept():
    sizes = MeshConfig(data=4, seq=2)
    with jax.set_mesh(mesh := make_mesh(sizes)):
        tokens, targets = map(np.asarray, tokens_for(MODEL))
        batch = global_batch({"tokens": tokens, "targets": targets}, mesh)

        def messages(remat):
            form = RingConfig(layout="contiguous")
            execution = ExecutionConfig(mesh=sizes, remat=remat, sequence_parallel=form)
            function = loss_and_gradients(MODEL, execution)
            return function.lower(values_of(MODEL), batch).as_text().count("collective_permute")

        assert messages("none") == messages("kernels") == messages("attention") < messages("full")


@pytest.mark.slow
def test_layers_without_experts_have_a_remat_of_their_own():
    """The same loss and gradients, and the recomputed products of one kind of layer alone."""
    model = dataclasses.replace(MODEL, dense_layers=(0,), dense_dim=32)
    tokens, targets = tokens_for(model)
    batch = {"tokens": tokens, "targets": targets}
    products = {}
    for routed, dense in itertools.product(("none", "full"), repeat=2):
        execution = ExecutionConfig(remat=routed, remat_dense=dense)
        function = loss_and_gradients(model, execution)
        assert_close(function(values_of(model), batch), on_one_device(model), "end_to_end")
        products[routed, dense] = function.lower(values_of(model), batch).as_text().count("dot_g")
    least = products["none", "none"]
    both = products["full", "full"] - least
    assert 0 < products["none", "full"] - least < both
    assert products["none", "full"] + products["full", "none"] - 2 * least == both


def test_padding_changes_no_loss_or_gradient():
    """Three positions of padding behind every row, filled with tokens like any other."""
    tokens, targets = tokens_for(MODEL)
    other, _ = tokens_for(MODEL, seed=1)
    padded = {
        "tokens": jnp.concatenate([tokens, other[:, :3]], axis=1),
        "targets": jnp.concatenate([targets, other[:, :3]], axis=1),
        "segment_ids": jnp.asarray([[1] * LENGTH + [0] * 3] * BATCH, jnp.int32),
    }
    result = loss_and_gradients(MODEL, ON_ONE)(values_of(MODEL), padded)
    assert_close(result, on_one_device(MODEL), "other_length")


# The MoE layer.


def layer_case(**changes):
    return dataclasses.replace(TINY.moe, **changes)


LAYERS = {
    **{gate: layer_case(gate=GATES[gate]()) for gate in GATES},
    "after": layer_case(router=SoftmaxTopKConfig(softmax="after"), gate=GATES["softmax"]()),
    "top_1": layer_case(top_k=1, gate=GATES["softmax"]()),
    "shared": layer_case(num_shared_experts=2),
    "sqrt_shared": layer_case(num_shared_experts=2, gate=SqrtGateConfig()),
    "capacity_by_gate": layer_case(capacity=CapacityConfig(factor=0.75)),
    "capacity_by_position": layer_case(capacity=CapacityConfig(factor=0.75, keep="position")),
}


def layer_values(moe):
    """Parameters of one MoE layer, its input, and a mask with padding in some rows."""
    model = dataclasses.replace(TINY, moe=moe, num_layers=1)
    stacked = values_of(model)["moe_blocks_0"]["moe"]
    x = jax.random.normal(jax.random.key(2), (BATCH, LENGTH, TINY.embed_dim))
    token_mask = jnp.asarray(np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 11 != 5)
    return jax.tree.map(lambda leaf: leaf[0], stacked), x, token_mask


def apply_layer(moe, params, x, token_mask, execution=ON_ONE):
    model = dataclasses.replace(TINY, moe=moe, num_layers=1)
    layer = MoELayer(moe, model.context, execution, train=True)
    routing = RoutingInputs(
        token_mask=token_mask, segment_ids=token_mask.astype(jnp.int32), router_state={}
    )
    y, outputs = layer.apply({"params": params}, x, routing)
    return y, outputs.statistics


@pytest.mark.rows(3)
@pytest.mark.parametrize("moe", LAYERS.values(), ids=LAYERS)
def test_moe_layer_equals_dense_oracle(moe):
    params, x, token_mask = layer_values(moe)
    gate = "renormalized" if moe.router.softmax == "after" else moe.gate.name
    flat, mask = x.reshape(-1, x.shape[-1]), np.asarray(token_mask).ravel()
    capacity, keep = None, "gate"
    if moe.capacity is not None:
        keep = moe.capacity.keep
        capacity = moe.capacity.rows(LENGTH, moe.top_k, moe.num_experts)
    chosen, kept = dense_moe.decide(
        params,
        flat,
        top_k=moe.top_k,
        gate=gate,
        token_mask=mask,
        capacity=capacity,
        keep=keep,
        sequence_length=LENGTH,
    )
    cotangent = jax.random.normal(jax.random.key(3), x.shape)

    @jax.jit
    def ours(params, x):
        (y, statistics), back = jax.vjp(lambda p, x: apply_layer(moe, p, x, token_mask), params, x)
        return y, back((cotangent, jax.tree.map(jnp.zeros_like, statistics))), statistics

    @jax.jit
    def theirs(params, x):
        y, back = jax.vjp(
            lambda p, x: dense_moe.dense_moe(
                p, x.reshape(flat.shape), chosen, kept, gate=gate
            ).reshape(x.shape),
            params,
            x,
        )
        return y, back(cotangent)

    y, gradients, statistics = ours(params, x)
    assert_close((y, gradients), theirs(params, x), "end_to_end")
    assert statistics.counts.tolist() == chosen.sum(0).tolist()
    assert statistics.kept.tolist() == kept.sum(0).tolist()
    assert (chosen.sum() > kept.sum()) == (moe.capacity is not None)


@functools.cache
def whole_layer(moe, execution=ON_ONE):
    return jax.jit(lambda params, x, mask: apply_layer(moe, params, x, mask, execution))


LIMITED = LAYERS["capacity_by_gate"]


@pytest.mark.parametrize(
    "mesh",
    [pytest.param("data4_tensor2", marks=pytest.mark.slow), "replica2_data2_expert2"],
)
def test_capacity_drops_the_same_on_every_mesh(mesh):
    params, x, token_mask = layer_values(LIMITED)
    wanted = whole_layer(LIMITED)(params, x, token_mask)
    placed = global_batch({"x": np.asarray(x), "mask": np.asarray(token_mask)}, mesh_named(mesh))
    execution = ExecutionConfig(mesh=MESHES[mesh])
    with jax.set_mesh(mesh_named(mesh)):
        everywhere = jax.device_put(params, PartitionSpec())
        y, statistics = whole_layer(LIMITED, execution)(everywhere, placed["x"], placed["mask"])
    assert y.sharding.spec == PartitionSpec(BATCH_AXES, ("seq", "tensor"), None)
    assert_close((y, statistics), wanted, "end_to_end")
    assert statistics.kept.tolist() == wanted[1].kept.tolist()


def test_capacity_drops_the_same_when_the_batch_is_split():
    params, x, token_mask = layer_values(LIMITED)
    y, statistics = whole_layer(LIMITED)(params, x, token_mask)
    half = BATCH // 2
    parts = [
        whole_layer(LIMITED)(params, x[rows], token_mask[rows])
        for rows in (slice(0, half), slice(half, BATCH))
    ]
    assert_close(jnp.concatenate([part[0] for part in parts]), y, "matmul")
    assert_close(parts[0][1] + parts[1][1], statistics, "matmul")


@pytest.mark.parametrize("keep", ["gate", "position"])
def test_capacity_of_all_tokens_equals_dropless(keep):
    plain = layer_case()
    roomy = layer_case(capacity=CapacityConfig(factor=plain.num_experts / plain.top_k, keep=keep))
    params, x, token_mask = layer_values(plain)
    results = [whole_layer(moe)(params, x, token_mask) for moe in (plain, roomy)]
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(ours, theirs)
