# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters of the view form against the factor form and against folded weights."""

import contextlib
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.extend.core import jaxprs_in_params

from jaxmoe.adapters import (
    LiftConfig,
    LoraConfig,
    QuantisedChoicesConfig,
    TargetsConfig,
    fold_adapters,
)
from jaxmoe.adapters.base import frozen
from jaxmoe.adapters.factors import TRAINED, own_row
from jaxmoe.contrib.estimators.noise import noise_sum, noise_view
from jaxmoe.declarations import Declaration
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.layers.view import view_outside
from jaxmoe.models.config import AttentionConfig, LayerConfig, ModelConfig, MoEConfig
from jaxmoe.models.transformer import forward
from jaxmoe.optim import adamw
from jaxmoe.parameters import ParameterTable
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from sharding import axes as ax
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.models import FULL, TINY, WIDE
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
    "embedding",
)
WINDOWED = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, window=3)
CYCLE = dataclasses.replace(TINY, num_layers=4, layers=(LayerConfig(mixer=WINDOWED), LayerConfig()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ViewedLora(LoraConfig):
    """LoRA whose sum with the weights is made inside the scan over layers."""

    has_view: ClassVar[bool] = True

    def rewrite(self, params, shared, part):
        """Return W + s A B for each adapted matrix of the part."""
        del shared, part
        return fold_adapters(params)


GIVEN = {"rank": 3, "expert_rank": 2, "targets": TargetsConfig(roles=MATRICES)}


def adapted(model, adapter):
    return dataclasses.replace(model, adapter=adapter)


def drawn(model):
    """Parameters with an addition that is not zero."""
    params = traverse_util.flatten_dict(init_params(model, jax.random.key(0)), sep="/")
    keys = dict(zip(params, jax.random.split(jax.random.key(1), len(params)), strict=True))
    for path in [path for path in params if path.endswith(":up")]:
        params[path] = 0.3 * jax.random.normal(keys[path], params[path].shape)
    return traverse_util.unflatten_dict(params, sep="/")


def tokens(model, rows=2, length=6):
    return jax.random.randint(jax.random.key(2), (rows, length), 0, model.vocab_size)


def loss_and_gradients(model, execution, params, ids, *, is_folded=False):
    """Return those of the trained parameters, by the adapter or by plain weights."""
    table = parameter_table(model)

    def loss(trained):
        used, given = model, table.merge(trained, params)
        if is_folded:
            given = fold_adapters(given, model.adapter, model.layer_numbers)
            used = adapted(model, None)
        return jnp.mean(forward(used, execution, given, ids).logits ** 2)

    return jax.value_and_grad(loss)(table.select_trained(params))


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", ["full", "cycle"])
def test_factor_view_and_folded_weights_are_equal(name):
    base = {"full": FULL, "cycle": CYCLE}[name]
    forms = {
        "factor": (adapted(base, LoraConfig(**GIVEN)), False),
        "view": (adapted(base, ViewedLora(**GIVEN)), False),
        "fold": (adapted(base, ViewedLora(**GIVEN)), True),
    }
    params, ids = drawn(forms["factor"][0]), tokens(base)
    found = {
        form: jax.jit(
            functools.partial(loss_and_gradients, model, ExecutionConfig(), is_folded=is_folded)
        )(params, ids)
        for form, (model, is_folded) in forms.items()
    }
    assert_close(found["view"], found["fold"], "end_to_end")
    assert_close(found["view"], found["factor"], "end_to_end")
    assert float(jnp.abs(found["view"][1]["embedding"]["weight:down"]).max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("base", [dataclasses.replace(WIDE, num_layers=1), FULL])
def test_the_loss_of_training_reads_the_adapted_head(base):
    """The head that the loss multiplies with by itself, and the embedding tied to it."""
    given = GIVEN | {"targets": TargetsConfig(roles=("head", "embedding"))}
    params, grads = drawn(adapted(base, LoraConfig(**given))), []
    for config, is_folded in ((LoraConfig, False), (ViewedLora, False), (LoraConfig, True)):
        model = adapted(base, config(**given))
        table = parameter_table(model)

        def loss(trained, rows, model=model, table=table, is_folded=is_folded):
            whole = table.merge(trained, params)
            used = adapted(model, None) if is_folded else model
            whole = fold_adapters(whole) if is_folded else whole
            return forward_and_nll(used, ExecutionConfig(), whole, rows)[0]

        grads.append(jax.jit(jax.grad(loss))(table.select_trained(params), batch()))
    assert_close(grads[0], grads[2], "end_to_end")
    assert_close(grads[1], grads[2], "end_to_end")
    module = "embedding" if base.has_tied_embeddings else "head"
    assert float(jnp.abs(grads[0][module]["weight:up"]).max()) > 0


@pytest.mark.slow
def test_noise_of_an_estimator_reaches_own_parameters_before_they_are_used():
    model = adapted(CYCLE, ViewedLora(**GIVEN))
    params, ids, key = drawn(model), tokens(CYCLE), jax.random.key(5)
    table, names = parameter_table(model), [scan.name for scan in model.scans]

    def perturbed(params):
        view = noise_view(table, model.scans, key, jnp.float32(0.1))
        outside, layers = view_outside(params, view, names)
        return forward(model, ExecutionConfig(), outside, ids, view=layers).logits

    def moved(params):
        z = noise_sum(table, params, key[None], jnp.full((1,), 0.1))
        moved = jax.tree.map(jnp.add, table.select_trained(params), table.select_trained(z))
        whole = fold_adapters(table.merge(moved, params), model.adapter, model.layer_numbers)
        return forward(CYCLE, ExecutionConfig(), whole, ids).logits

    assert_close(jax.jit(perturbed)(params), jax.jit(moved)(params), "end_to_end")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedShift(ViewedLora):
    """One vector at the root, which is added to the values of all layers."""

    def table(self, base, rules, layers):
        """Return the table with the vector."""
        del layers
        given = Declaration(shape=(6,), axes=(ax.RANK,), role="adapter", matrix=None, init="ones")
        row = own_row("adapter:shift", given, TRAINED, rules)
        return ParameterTable((row, *(frozen(row) for row in base)))

    def rewrite(self, params, shared, part):
        """Return the part with the vector in `v`."""
        if "attention" not in params:
            return params
        added = params["attention"]["v"] + shared["adapter:shift"][None, None, :]
        return params | {"attention": params["attention"] | {"v": added}}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_layers_share_own_parameters_at_the_root(remat):
    model = adapted(FULL, SharedShift())
    params, ids = init_params(model, jax.random.key(0)), tokens(FULL)
    run = functools.partial(loss_and_gradients, model, ExecutionConfig(remat=remat))
    found = jax.jit(run)(params, ids)
    wanted = jax.jit(functools.partial(run, is_folded=True))(params, ids)
    assert_close(found, wanted, "end_to_end")
    assert float(jnp.abs(found[1]["adapter:shift"]).min()) > 0


LIFT = LiftConfig(rank=1, approximation_rank=4, refresh_every=2, targets=GIVEN["targets"])
MEMBERS = {
    "lora": ViewedLora(**GIVEN),
    "lift": LIFT,
    "quantised_choices": QuantisedChoicesConfig(
        rank=2, targets=TargetsConfig(roles=MATRICES[:-1]), mean_bits=2.6
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", "dots"])
@pytest.mark.parametrize("name", ["lora", "lift"])
def test_rewritten_weights_are_not_kept_for_the_backward_pass(name, remat, dtype):
    """A loop hands its backward pass no more than without an adapter, and no array of a weight."""
    base = ModelConfig(
        vocab_size=32,
        num_layers=8,
        embed_dim=128,
        attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=32),
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=96),
    )
    targets = TargetsConfig(roles=("attention_in", "attention_out", "expert_in", "expert_out"))
    adapter = dataclasses.replace(MEMBERS[name], rank=4, targets=targets)
    execution = ExecutionConfig(remat=remat, precision=PrecisionPolicy(compute=dtype))

    def kept(model):
        shapes = parameter_table(model).tree(
            lambda row: jax.ShapeDtypeStruct(row.shape, row.declaration.dtype or "float32")
        )
        run = functools.partial(loss_and_gradients, model, execution)
        ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        return list(_stacked(jax.make_jaxpr(run)(shapes, ids).jaxpr, 8))

    arrays, without = kept(adapted(base, adapter)), kept(base)
    assert sum(map(_bytes, arrays)) <= sum(map(_bytes, without))
    # A matrix of the experts is the largest of all, and no activation has its size.
    sizes = {4 * 128 * 2 * 96 * 8, 4 * 128 * 96 * 8}
    assert not sizes & {array.size for array in arrays}
    assert dtype == "float32" or remat == "dots" or sizes & {array.size for array in without}


def _bytes(array):
    return array.size * array.dtype.itemsize


def _stacked(jaxpr, length):
    """Return the arrays that forward loops over layers hand to their backward passes."""
    for equation in jaxpr.eqns:
        is_loop = equation.primitive.name == "scan" and equation.params["length"] == length
        if is_loop and not equation.params["reverse"]:
            arrays = [variable.aval for variable in equation.outvars]
            yield from (array for array in arrays if array.shape[:1] == (length,))
        for inner in jaxprs_in_params(equation.params):
            yield from _stacked(inner, length)


MESHES = {
    "data2_tensor2": ExecutionConfig(mesh=MeshConfig(data=2, tensor=2)),
    "data4": ExecutionConfig(mesh=MeshConfig(data=4)),
    "data2_expert2": ExecutionConfig(mesh=MeshConfig(data=2, expert=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", MEMBERS)
def test_steps_on_a_mesh_equal_those_of_one_device(name, sizes):
    """Two steps, with a choice of entries before the first and after the second."""
    model, optimizer, rows = adapted(WIDE, MEMBERS[name]), adamw(1e-2), batch()
    ends = []
    for execution in (ExecutionConfig(), MESHES[sizes]):
        mesh = None if execution == ExecutionConfig() else mesh_of(execution)
        state = init_state(model, optimizer, jax.random.key(0), execution=execution, mesh=mesh)
        step = make_train_step(model, optimizer, execution=execution)
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            placed = rows if mesh is None else global_batch(rows, mesh)
            for _ in range(2):
                state, metrics = step(state, placed)
        assert int(state.skipped) == 0
        ends.append((metrics.loss, jax.tree.map(np.asarray, state.params)))
    assert_close(ends[1], ends[0], "end_to_end")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rules": "zero2"}, "rules=zero2 gathers them before"),
        ({"offload": OffloadConfig()}, "changes the state after each step"),
        (
            {"precision": PrecisionPolicy(weights="w4a16")},
            "rewrites weights, and execution.precision.weights=w4a16",
        ),
    ],
)
def test_executions_that_a_view_does_not_fit_are_refused(given, message):
    model = adapted(TINY, LiftConfig())
    with pytest.raises(ValueError, match=message):
        make_train_step(model, adamw(1e-2), execution=ExecutionConfig(**given))
