# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters against the same model with the addition in its weights, and against the model alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding

from jaxmoe import catalog
from jaxmoe.adapters import (
    AdaLoraConfig,
    LiftConfig,
    LoraConfig,
    LoraMixerConfig,
    MixtureOfShardsConfig,
    MultiHeadRoutingConfig,
    QuantisedChoicesConfig,
    RemixConfig,
    SelectConfig,
    SharedStoreConfig,
    SwitchLoraConfig,
    TargetsConfig,
    TaskLoraConfig,
    fold_adapters,
    with_base,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import LatentAttentionConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.models.quantize import dequantize_parameter, quantize_parameter
from jaxmoe.models.transformer import forward
from jaxmoe.optim import adamw
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.state import state_around
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig
from tests.support.meshes import mesh_of
from tests.support.models import FULL, WIDE
from tests.support.one_step import batch
from tests.support.tolerances import assert_close

MATRICES = (
    "attention_in",
    "attention_out",
    "attention_gate",
    "mlp_in",
    "mlp_out",
    "shared_in",
    "shared_out",
    "expert_in",
    "expert_out",
)
LATENT = dataclasses.replace(
    FULL,
    attention=LatentAttentionConfig(
        num_heads=2, latent_dim=8, query_latent_dim=6, nope_dim=4, rope_dim=4, value_dim=4
    ),
    num_layers=2,
)
DENSE = TargetsConfig(roles=MATRICES[:7])
EVERYWHERE = LoraConfig(rank=3, expert_rank=2, targets=TargetsConfig(roles=MATRICES))
ADAPTERS = {
    "lora": EVERYWHERE,
    "adalora": AdaLoraConfig(
        rank=3, expert_rank=2, target_rank=1, targets=TargetsConfig(roles=MATRICES)
    ),
    "switch_lora": SwitchLoraConfig(
        rank=3, expert_rank=2, candidates=4, targets=TargetsConfig(roles=MATRICES)
    ),
    "mixture_of_shards": MixtureOfShardsConfig(
        rank=3, expert_rank=2, shards=2, targets=TargetsConfig(roles=MATRICES)
    ),
    "select": SelectConfig(targets=TargetsConfig(roles=("norm", "expert_out"))),
    "lift": LiftConfig(
        rank=1,
        approximation_rank=2,
        targets=TargetsConfig(roles=("attention_out", "expert_in", "head"), layers=(0, 2)),
    ),
    "quantised_choices": QuantisedChoicesConfig(rank=2, targets=TargetsConfig(roles=MATRICES)),
    "task_lora": TaskLoraConfig(rank=2, targets=DENSE),
    "lora_mixer": LoraMixerConfig(rank=2, targets=DENSE),
    "multi_head_routing": MultiHeadRoutingConfig(rank=2, splits=2, targets=DENSE),
    "remix": RemixConfig(rank=2, targets=DENSE),
    "shared_store": SharedStoreConfig(),
}
ROUNDED_OR_NEW = ("quantised_choices", "shared_store")
MODELS = {
    "attention, dense, shared, experts": FULL,
    "latent": LATENT,
    "head, router": dataclasses.replace(WIDE, num_layers=1),
}


def rows_of(table, in_short):
    """Return names for `pytest.mark.parametrize`; those other than one are slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name == in_short else slow) for name in table]


def members(table):
    """Return names for `pytest.mark.parametrize`; adapters of the vertical are marked as such."""
    vertical = pytest.mark.vertical("adapters")
    return [pytest.param(n, marks=() if n in ("lora", "select") else vertical) for n in table]


def adapted(model, adapter):
    return dataclasses.replace(model, adapter=adapter)


def drawn(model):
    """Parameters with an addition that is not zero."""
    params = traverse_util.flatten_dict(init_params(model, jax.random.key(0)), sep="/")
    keys = dict(zip(params, jax.random.split(jax.random.key(1), len(params)), strict=True))
    for path in [path for path in params if path.endswith((":up", ":values"))]:
        params[path] = 0.3 * jax.random.normal(keys[path], params[path].shape)
    return traverse_util.unflatten_dict(params, sep="/")


def tokens(model, rows=2, length=6):
    return jax.random.randint(jax.random.key(2), (rows, length), 0, model.vocab_size)


def loss_and_gradients(model, execution, params, ids, *, is_folded=False):
    """Return those of the trained parameters, by the factors or by their sum with the weights."""
    table = parameter_table(model)

    def loss(trained):
        whole = table.merge(trained, params)
        plain = adapted(model, None)
        used, given = (
            (plain, fold_adapters(model.adapter.prepare(whole, model.layer_numbers)))
            if is_folded
            else (model, whole)
        )
        return jnp.mean(forward(used, execution, given, ids).logits ** 2)

    return jax.value_and_grad(loss)(table.select_trained(params))


def test_every_adapter_has_a_row():
    assert set(catalog.names("adapter")) == set(ADAPTERS)


@pytest.mark.parametrize("name", rows_of(MODELS, "attention, dense, shared, experts"))
def test_factors_equal_their_sum_with_the_weights(name):
    roles = ("head", "router", "embedding") if name == "head, router" else MATRICES
    adapter = dataclasses.replace(EVERYWHERE, targets=TargetsConfig(roles=roles))
    model = adapted(MODELS[name], adapter)
    params, ids = drawn(model), tokens(model)
    found = jax.jit(functools.partial(loss_and_gradients, model, ExecutionConfig()))(params, ids)
    wanted = jax.jit(
        functools.partial(loss_and_gradients, model, ExecutionConfig(), is_folded=True)
    )(params, ids)
    assert_close(found, wanted, "end_to_end")
    gradients = traverse_util.flatten_dict(found[1], sep="/")
    adapted_paths = [path for path in gradients if path.endswith((":down", ":up"))]
    assert adapted_paths and all(float(jnp.abs(gradients[p]).max()) > 0 for p in adapted_paths)


@pytest.mark.parametrize("name", members([n for n in ADAPTERS if n not in ROUNDED_OR_NEW]))
def test_an_adapter_begins_as_the_model_it_adapts(name):
    """Bitwise where experts are not adapted: those are multiplied in another order. Choices of bits
    begin as the rounded model, a shared store has no other."""
    adapter = ADAPTERS[name]
    if name != "select":
        adapter = dataclasses.replace(adapter, targets=DENSE)
    model = adapted(FULL, adapter)
    base = init_params(FULL, jax.random.key(3))
    params = with_base(init_params(model, jax.random.key(4)), base)
    ids, execution = tokens(FULL), ExecutionConfig()
    found = jax.jit(lambda p: forward(model, execution, p, ids).logits)(params)
    wanted = jax.jit(lambda p: forward(FULL, execution, p, ids).logits)(base)
    np.testing.assert_array_equal(found, wanted)


def test_layers_that_are_not_named_keep_their_weights():
    targets = TargetsConfig(roles=("attention_in", "expert_in"), layers=(2,))
    model = adapted(FULL, dataclasses.replace(EVERYWHERE, targets=targets))
    params = drawn(model)
    plain, flat = fold_adapters(params), traverse_util.flatten_dict(params, sep="/")
    for path, value in traverse_util.flatten_dict(plain, sep="/").items():
        changed = np.any(np.asarray(value != flat[path]), axis=tuple(range(1, value.ndim)))
        is_target = path.endswith(("attention/q", "attention/k", "attention/v", "gate_up"))
        is_in_stack = path.startswith("moe_blocks_1/") and "shared" not in path and is_target
        wanted = [False, True] if is_in_stack else [False] * value.shape[0]
        assert changed.tolist() == wanted, path


def test_pattern_and_roles_choose_the_targets():
    targets = TargetsConfig(roles=("attention_in",), pattern="*/attention/[qv]")
    table = parameter_table(adapted(FULL, LoraConfig(targets=targets)))
    assert {row.path.rpartition("/")[2] for row in table.trained_rows} == {
        "q:down",
        "q:up",
        "v:down",
        "v:up",
    }


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            LoraConfig(targets=TargetsConfig(roles=("norm",))),
            r"roles=\('norm',\): the model has no",
        ),
        (LoraConfig(targets=TargetsConfig(layers=(9,))), "names no layer with attention_in"),
        (
            SelectConfig(targets=TargetsConfig(roles=("expert_in",), layers=(1,))),
            "has some of the layers 1, 2",
        ),
        (SelectConfig(targets=TargetsConfig(roles=("state",))), "its roles are attention_gate"),
    ],
)
def test_targets_that_are_not_there_are_refused(adapter, message):
    with pytest.raises(ValueError, match=message):
        parameter_table(adapted(FULL, adapter))


@pytest.mark.parametrize("name", rows_of(ADAPTERS, "lora"))
def test_frozen_parameters_stay_bitwise(name):
    model = adapted(FULL, ADAPTERS[name])
    table = parameter_table(model)
    optimizer = adamw(1e-2)
    state = state_around(model, optimizer, ExecutionConfig(), drawn(model), jax.random.key(0))
    before = traverse_util.flatten_dict(jax.tree.map(np.asarray, state.params), sep="/")
    step, rows = make_train_step(model, optimizer), batch()
    # Of three choices one is drawn twice in four steps: the first moves `ups`, from zero, alone.
    for _ in range(4):
        state, metrics = step(state, rows)
    assert np.isfinite(float(metrics.loss)) and int(state.skipped) == 0
    after = traverse_util.flatten_dict(jax.tree.map(np.asarray, state.params), sep="/")
    for row in table:
        same = np.array_equal(
            after[row.path], traverse_util.flatten_dict(before, sep="/")[row.path]
        )
        may_move = ADAPTERS[name].moves_base and f"{row.path}:down" in after
        assert same == row.is_frozen or may_move, row.path


def test_no_gradient_of_the_shape_of_a_weight_is_formed():
    """A gradient of experts would be the only f32 array of their shape that is not a parameter."""
    model = adapted(
        dataclasses.replace(WIDE, num_layers=1),
        LoraConfig(rank=2, targets=TargetsConfig(roles=("attention_in", "expert_out"))),
    )
    table, params, ids = parameter_table(model), drawn(model), tokens(model, 2, 16)

    def compiled(is_folded):
        run = functools.partial(
            loss_and_gradients, model, ExecutionConfig(remat="full"), is_folded=is_folded
        )
        return jax.jit(run).lower(params, ids).compile()

    (row,) = [row for row in table if row.path.endswith("experts/down")]
    shape = ",".join(map(str, row.shape[1:]))

    def dots(program):
        lines = [line for line in program.as_text().splitlines() if f"f32[{shape}]" in line]
        return sum(" dot(" in line or "custom-call" in line for line in lines)

    factors, whole = compiled(False), compiled(True)
    assert dots(factors) == 0
    assert factors.cost_analysis()["flops"] < whole.cost_analysis()["flops"]


def test_frozen_products_count_two_thirds_of_the_flops():
    base = parameter_table(FULL)
    model = adapted(FULL, LoraConfig(rank=1, targets=TargetsConfig(roles=("attention_out",))))
    whole, less = (
        flops_per_token(FULL, base, 6),
        flops_per_token(model, parameter_table(model), 6),
    )
    mixing = sum(kind.mixer.flops_per_token(6) for kind in FULL.kinds)
    factors = 6 * 3 * (4 * 6 + 16)
    assert less - mixing == pytest.approx((whole - mixing) * 4 / 6 + factors)


@pytest.mark.slow
def test_factors_on_weights_in_four_bits():
    model = adapted(FULL, EVERYWHERE)
    params, table = drawn(model), parameter_table(model)
    held = traverse_util.flatten_dict(params, sep="/")
    few = {row.path: quantize_parameter(row, held[row.path], "w4a16") for row in table}
    wide = {path: dequantize_parameter(value) for path, value in few.items()}
    few, wide = (traverse_util.unflatten_dict(one, sep="/") for one in (few, wide))
    ids, execution = tokens(FULL), ExecutionConfig()
    found = jax.jit(functools.partial(loss_and_gradients, model, execution))(few, ids)
    wanted = jax.jit(functools.partial(loss_and_gradients, model, execution))(wide, ids)
    assert_close(found, wanted, "end_to_end")


EXECUTIONS = {
    "data2_tensor2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2)),
    "data4": ExecutionConfig(mesh=MeshConfig(data=4), remat="full"),
    "zero2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2), rules="zero2"),
    "replica2_hierarchical": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=2), rules="hierarchical"
    ),
    "data2_expert4": ExecutionConfig(
        mesh=MeshConfig(data=2, expert=4), dispatcher=AllToAllConfig()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTIONS)
def test_loss_and_gradients_equal_one_device(name):
    execution, model = EXECUTIONS[name], adapted(WIDE, EVERYWHERE)
    params, ids = drawn(model), tokens(WIDE, 8, 16)
    wanted = jax.jit(functools.partial(loss_and_gradients, model, ExecutionConfig()))(params, ids)
    mesh, table = mesh_of(execution), parameter_table(model, rules=execution.axis_rules)
    placed = jax.device_put(params, table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(loss_and_gradients, model, execution))
        found = run(placed, global_batch(np.asarray(ids), mesh))
    assert_close(found, wanted, "end_to_end")
