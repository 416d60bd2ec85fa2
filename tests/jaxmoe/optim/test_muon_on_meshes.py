# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Optimiser steps with whole matrices are the same on every mesh and sharding.

The oracle is the same code without a mesh, which test_muon.py and test_hypersphere.py have against
optax and numpy.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmoe.checkpoint import load_checkpoint, save_checkpoint
from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import LinearConfig, MuonConfig, MuonHConfig, muon, muonh
from jaxmoe.optim.hypersphere import SphereState
from jaxmoe.optim.muon import NewtonSchulzConfig
from jaxmoe.scaling import standard
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig, MoEMesh
from sharding.distributed import global_batch
from sharding.expert_parallel import AllToAllConfig
from sharding.products.whole_matrices import map_matrices
from sharding.state_layouts import STATE_LAYOUTS
from tests.support.meshes import LAYOUTS, MESHES, mesh_named, mesh_of
from tests.support.models import FULL, TINY, in_groups
from tests.support.one_step import batch
from tests.support.tolerances import assert_close

P = PartitionSpec
every_way = pytest.mark.parametrize("way", ["spread", "gathered"])


def cubed(x):
    """Cheap to compile, needs whole matrices, zeros to zeros."""
    return jnp.matmul(jnp.matmul(x, x.mT), x) + x


def matrices_of(model, rules):
    """(shape, inputs, outputs, spec) of every matrix of a model, from 0."""
    found = {}
    for row in parameter_table(model, rules=STATE_LAYOUTS[rules].optimizer):
        if (axes := row.declaration.matrix) is not None:
            ins, outs = (tuple(len(row.shape) + dim for dim in side) for side in axes)
            found[row.path] = (row.shape, ins, outs, row.spec)
    return found


def values(shapes):
    rng = np.random.default_rng(0)
    return {path: rng.standard_normal(shape).astype(np.float32) for path, shape in shapes.items()}


def mapped(matrices, way):
    def run(tree):
        return {
            path: map_matrices(cubed, tree[path], inputs=ins, outputs=outs, layout=way)
            for path, (_, ins, outs, _) in matrices.items()
        }

    return jax.jit(run)


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    ("mesh", "rules", "way"),
    [
        *((mesh, rules, "spread") for mesh, rules in LAYOUTS),
        ("data4_tensor2", "fully_sharded", "gathered"),
        ("replica2_data2_expert2", "fully_sharded", "gathered"),
    ],
)
def test_an_update_is_the_same_on_every_mesh(mesh, rules, way):
    """Stacks of 1, 2 and 8 matrices on up to 8 devices, divisible or not."""
    matrices = matrices_of(FULL, rules)
    tree = values({path: matrix[0] for path, matrix in matrices.items()})
    wanted = mapped(matrices, way)(jax.tree.map(jnp.asarray, tree))
    specs = {path: NamedSharding(mesh_named(mesh), m[3]) for path, m in matrices.items()}
    with jax.set_mesh(mesh_named(mesh)):
        got = mapped(matrices, way)(jax.device_put(tree, specs))
    assert_close(got, wanted, "matmul")
    assert {path: leaf.sharding.spec for path, leaf in got.items()} == {
        path: m[3] for path, m in matrices.items()
    }


SPECS = {
    "through one side": ("data8", P(None, "data", None)),
    "through the other": ("data8", P(None, None, "data")),
    "through both": ("data4_tensor2", P(None, "data", "tensor")),
    "one side twice": ("data4_tensor2", P(None, ("tensor", "data"), None)),
    "in the stack": ("data4_tensor2", P("tensor", "data", None)),
    "copies": ("replica2_data2_expert2", P(None, "data", None)),
    "nothing but copies": ("data8", P(None, None, None)),
}


@pytest.mark.rows(8)
@every_way
@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize("size", [6, 16])
def test_an_update_is_the_same_for_every_sharding_of_a_stack(case, size, way):
    mesh, spec = SPECS[case]
    x = values({"w": (size, 16, 8)})["w"]
    run = jax.jit(lambda x: map_matrices(cubed, x, inputs=(1,), outputs=(2,), layout=way))
    wanted = run(jnp.asarray(x))
    with jax.set_mesh(mesh_named(mesh)):
        got = run(jax.device_put(x, NamedSharding(mesh_named(mesh), spec)))
    assert_close(got, wanted, "matmul")
    assert got.sharding.spec == spec


@pytest.mark.parametrize(
    ("case", "way", "calls"),
    [
        ("through one side", "spread", {"all-to-all": 2}),
        ("through both", "spread", {"all-to-all": 4}),
        ("copies", "spread", {"all-to-all": 2, "all-gather": 1}),
        ("nothing but copies", "spread", {"all-gather": 1}),
        ("through one side", "gathered", {"all-gather": 1}),
        ("nothing but copies", "gathered", {}),
    ],
)
def test_collectives_of_an_update(case, way, calls):
    """The collectives in the docstring of sharding/products/whole_matrices.py, and no others."""
    mesh, spec = SPECS[case]
    placed = NamedSharding(mesh_named(mesh), spec)
    x = jax.ShapeDtypeStruct((16, 16, 8), jnp.float32, sharding=placed)
    with jax.set_mesh(mesh_named(mesh)):
        run = jax.jit(lambda x: map_matrices(cubed, x, inputs=(1,), outputs=(2,), layout=way))
        text = run.lower(x).compile().as_text()
    names = re.findall(r" (all-to-all|all-gather|all-reduce|collective-permute)(?:-start)?\(", text)
    assert {name: names.count(name) for name in set(names)} == calls


def train(optimizer, params, grads, place=lambda tree: tree):
    """Two steps; `place` puts a tree of parameters where it belongs."""
    params, state = place(params), jax.jit(optimizer.init)(place(params))
    update = jax.jit(optimizer.update)
    for given in (grads, jax.tree.map(lambda g: -2.0 * g, grads)):
        updates, state = update(place(given), state, params)
        params = jax.jit(lambda p, u: jax.tree.map(jnp.add, p, u))(params, updates)
    return params


def test_an_update_is_the_same_in_an_auto_mesh():
    """Auto axes with names of their own: XLA lays out."""
    params, grads = values({"w": (2, 3, 8, 16)}), values({"w": (3, 2, 16, 8)})
    grads = {"w": grads["w"].reshape(2, 3, 8, 16)}
    optimizer = muonh(0.1, matrix_axes=(-2, -1), sphere="stack")
    wanted = train(optimizer, params, grads)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    spread = NamedSharding(mesh, P(None, None, "fsdp", "tp"))
    with jax.set_mesh(mesh):
        got = train(optimizer, params, grads, lambda tree: jax.device_put(tree, spread))
    assert_close(got, wanted, "matmul")


@pytest.mark.parametrize("make", [muon, muonh])
def test_matrices_are_local_inside_a_shard_map(make):
    """Each of eight devices holds whole matrices of a stack."""
    params, grads = values({"w": (8, 6, 4)}), {"w": values({"w": (8, 4, 6)})["w"].swapaxes(1, 2)}
    wanted = train(make(0.1), params, grads)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    optimizer = make(0.1)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    def two_steps(params, grads):
        return train(optimizer, params, grads)

    assert_close(jax.jit(two_steps)(params, grads), wanted, "matmul")


SCHEDULE = LinearConfig().build(10)
OPTIMIZERS = {
    "muonh": (MuonHConfig(), ("muonh", "adamh")),
    "muonh stack gathered": (
        MuonHConfig(sphere="stack", newton_schulz=NewtonSchulzConfig(layout="gathered")),
        ("muonh", "adamh"),
    ),
    "muon": (MuonConfig(weight_decay=0.1), ("muon", "adamw")),
}


FOLDED = ExecutionConfig(
    mesh=MeshConfig(replica=2, data=2, tensor=2),
    fold=MoEMesh(expert=2),
    rules="hierarchical",
    dispatcher=AllToAllConfig(),
)


def on_mesh(name):
    return ExecutionConfig(mesh=MESHES[name])


def begin(name, execution=None):
    """State and step of a small model."""
    config, groups = OPTIMIZERS[name]
    rules = in_groups(standard(TINY), *groups)
    optimizer = config.build(parameter_table(TINY, rules), SCHEDULE)
    state = init_state(
        TINY,
        optimizer,
        jax.random.key(0),
        execution=execution,
        parameterization=rules,
        mesh=None if execution is None else mesh_of(execution),
    )
    return state, make_train_step(TINY, optimizer, execution=execution)


def advance(state, step, number, execution=None):
    for _ in range(number):
        if execution is None:
            state, metrics = step(state, batch())
        else:
            mesh = mesh_of(execution)
            with jax.set_mesh(mesh):
                state, metrics = step(state, global_batch(batch(), mesh))
        assert not metrics.is_skipped
    return state


@functools.cache
def on_one_device(name):
    state = advance(*begin(name), 2)
    return jax.tree.map(np.asarray, (state.params, state.opt_state))


def specs_of(tree):
    flat = traverse_util.flatten_dict(tree, sep="/")
    return {path: leaf.sharding.spec for path, leaf in flat.items() if hasattr(leaf, "sharding")}


@pytest.mark.parametrize(
    ("name", "execution"),
    [
        pytest.param("muonh", on_mesh("replica2_data2_expert2"), marks=pytest.mark.slow),
        pytest.param("muonh", on_mesh("data8"), marks=pytest.mark.slow),
        pytest.param("muonh", on_mesh("data4_tensor2"), marks=pytest.mark.slow),
        pytest.param(
            "muonh stack gathered", on_mesh("replica2_data2_expert2"), marks=pytest.mark.slow
        ),
        pytest.param("muon", on_mesh("data4_tensor2"), marks=pytest.mark.slow),
        pytest.param("muonh", FOLDED, marks=pytest.mark.slow),
        pytest.param("muon", FOLDED, marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_on_a_mesh(name, execution):
    state = advance(*begin(name, execution), 2, execution)
    params, opt_state = on_one_device(name)
    assert_close(state.params, params, "end_to_end")
    assert_close(state.opt_state, opt_state, "end_to_end")
    groups = state.opt_state.inner_states
    momentum = groups[name.split()[0]].inner_state[0].momentum
    where = specs_of(state.params)
    assert len(specs_of(momentum)) == 7 and specs_of(momentum).items() <= where.items()
    assert specs_of(groups["adamw"].inner_state[0].mu).items() <= where.items()


@pytest.mark.slow
@pytest.mark.large
def test_training_resumes_from_a_checkpoint_of_another_mesh(tmp_path):
    """Radii and momentum are restored in the layout of the new mesh; the step is the same."""
    state, _ = begin("muonh", on_mesh("data4_tensor2"))
    radii = [
        np.asarray(leaf)
        for leaf in jax.tree.leaves(state.opt_state, is_leaf=lambda n: isinstance(n, SphereState))
        if isinstance(leaf, SphereState)
        for leaf in jax.tree.leaves(leaf.radius)
    ]
    assert len(radii) == 8 and all((radius > 0.0).all() for radius in radii)
    state = advance(*begin("muonh", on_mesh("data4_tensor2")), 1, on_mesh("data4_tensor2"))
    save_checkpoint(tmp_path, state, step=1, config={})
    target, step = begin("muonh")
    restored = load_checkpoint(tmp_path, target=target)
    assert_close(restored.opt_state, jax.tree.map(np.asarray, state.opt_state), "elementwise")
    after = advance(restored, step, 1)
    params, opt_state = on_one_device("muonh")
    assert_close(after.params, params, "end_to_end")
    assert_close(after.opt_state, opt_state, "end_to_end")
    assert dataclasses.replace(after, params=None).step == 2
