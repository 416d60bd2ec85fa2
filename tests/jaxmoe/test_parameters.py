# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The parameter table and the values made from it.

The golden files tests/golden/parameter_tables/*.txt are the tables themselves, to be read in
review. To add a model to them: a row in TABLES, then `pytest --regenerate-golden`.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import AxisType

from jaxmoe.declarations import ROLES, Declaration, Declared, draw
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.models.presets import ladder, ladder_tokens
from jaxmoe.models.transformer import Transformer
from jaxmoe.scaling import HYPERP_BASE, Budget, Parameterization, hyperp, standard
from jaxmoe.scaling.initialize import init_params, parameter_table
from sharding import MeshConfig, make_mesh
from sharding.rules import FULLY_SHARDED
from sharding.state_layouts import STATE_LAYOUTS
from tests.support.meshes import LAYOUTS, mesh_named
from tests.support.models import FULL, TINY

TABLES = {
    "default": ModelConfig(),
    "everything": ModelConfig(
        num_layers=5,
        embed_dim=96,
        attention=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=16, is_gated=True),
        moe=MoEConfig(num_experts=16, top_k=3, expert_dim=40, num_shared_experts=2),
        dense_layers=(0, 3),
        dense_dim=320,
        has_tied_embeddings=True,
    ),
}
every_model = pytest.mark.parametrize("model", TABLES.values(), ids=TABLES)


def refusal(text):
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


def flat(params):
    return traverse_util.flatten_dict(params, sep="/")


@pytest.mark.parametrize("name", TABLES)
def test_the_table_as_text(name, golden):
    golden(f"parameter_tables/{name}.txt", parameter_table(TABLES[name]).text() + "\n")


def test_the_table_of_a_rung_under_hyperp_as_text(golden):
    budget = Budget(tokens=ladder_tokens(12), batch_tokens=2**21)
    built = hyperp(ladder(12), budget, HYPERP_BASE)
    golden("parameter_tables/hyperp_d12.txt", parameter_table(built.model, built).text() + "\n")


# Inputs and outputs of each matrix of a layer, by role and last name in the path.
def fans(model: ModelConfig) -> dict[tuple[str, str], tuple[int, int]]:
    width, attention, moe = model.embed_dim, model.attention, model.moe
    heads = attention.num_heads * attention.head_dim
    kv_heads = attention.num_kv_heads * attention.head_dim
    shared = moe.num_shared_experts * moe.expert_dim
    return {
        ("embedding", "weight"): (model.vocab_size, width),
        ("head", "weight"): (width, model.vocab_size),
        ("attention_in", "q"): (width, heads),
        ("attention_in", "k"): (width, kv_heads),
        ("attention_in", "v"): (width, kv_heads),
        ("attention_out", "o"): (heads, width),
        ("attention_gate", "gate"): (width, attention.num_heads),
        ("mlp_in", "gate_up"): (width, 2 * model.dense_dim),
        ("mlp_out", "down"): (model.dense_dim, width),
        ("shared_in", "gate_up"): (width, 2 * shared),
        ("shared_out", "down"): (shared, width),
        ("expert_in", "gate_up"): (width, 2 * moe.expert_dim),
        ("expert_out", "down"): (moe.expert_dim, width),
        ("router", "weight"): (width, moe.num_experts),
    }


@every_model
def test_inputs_and_outputs_of_every_matrix(model):
    for row in parameter_table(model):
        declaration = row.declaration
        if declaration.role == "norm":
            assert declaration.matrix is None and declaration.init == "ones"
            assert declaration.fan(0) == declaration.fan(1) == 1
            continue
        name = row.path.rpartition("/")[2]
        wanted = fans(model)[declaration.role, name]
        assert (declaration.fan(0), declaration.fan(1)) == wanted, row.path
        inputs, outputs = ({d % len(row.shape) for d in side} for side in declaration.matrix)
        assert not inputs & outputs
        batch = {
            axis for d, axis in enumerate(declaration.axes) if d not in inputs and d not in outputs
        }
        assert batch <= {"layers", "other_layers", "experts"}, row.path


def by_hand(model: ModelConfig, experts_met: int) -> int:
    """Parameters of a model of which each token meets this many routed experts."""
    width, attention, moe = model.embed_dim, model.attention, model.moe
    heads = 2 * attention.num_heads + 2 * attention.num_kv_heads
    layer = width * heads * attention.head_dim + 2 * attention.head_dim + 2 * width
    layer += width * attention.num_heads * attention.is_gated
    experts = 3 * width * moe.expert_dim * (experts_met + moe.num_shared_experts)
    total = model.num_layers * layer
    total += (model.num_layers - len(model.dense_layers)) * (experts + width * moe.num_experts)
    total += len(model.dense_layers) * 3 * width * model.dense_dim
    tables = 1 if model.has_tied_embeddings else 2
    return total + tables * model.vocab_size * width + width


@every_model
def test_total_and_active_parameters(model):
    table, moe = parameter_table(model), model.moe
    assert table.total == by_hand(model, moe.num_experts)
    assert table.active(moe.top_k, moe.num_experts) == by_hand(model, moe.top_k)
    assert table.total == sum(leaf.size for leaf in jax.tree.leaves(shapes(model)))


def shapes(model):
    return jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))


@every_model
def test_the_table_and_the_modules_agree(model):
    """Paths, shapes and logical axes are those of the arrays that Linen itself would make."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    boxed = jax.eval_shape(Transformer(model).init, jax.random.key(0), tokens)["params"]
    leaves = traverse_util.flatten_dict(
        boxed, sep="/", is_leaf=lambda _, leaf: isinstance(leaf, Declared)
    )
    rows = {row.path: row for row in parameter_table(model)}
    assert {path: leaf.value.shape for path, leaf in leaves.items()} == {
        path: row.shape for path, row in rows.items()
    }
    assert {path: leaf.shape for path, leaf in flat(shapes(model)).items()} == {
        path: row.shape for path, row in rows.items()
    }
    assert list(rows) == sorted(rows)
    for row in rows.values():
        assert len(row.declaration.axes) == len(row.shape) == len(row.spec)
        assert row.spec == FULLY_SHARDED.resolve(row.declaration.axes)


# Values.


@pytest.fixture(scope="module")
def values():
    return flat(init_params(TABLES["everything"], jax.random.key(0)))


def test_measured_standard_deviations(values):
    """The standard error of a measured sigma of normal values is sigma / sqrt(2 n)."""
    model = TABLES["everything"]
    into_residual = ("attention_out", "mlp_out", "shared_out", "expert_out")
    for row in parameter_table(model):
        measured = np.asarray(values[row.path], np.float64)
        role = row.declaration.role
        if role == "norm":
            assert (measured == 1.0).all() and row.init_std == 0.0
            continue
        wanted = 0.02 if role == "embedding" else row.declaration.fan(0) ** -0.5
        if role in into_residual:
            wanted /= math.sqrt(2 * model.num_layers)
        assert row.init_std == pytest.approx(wanted, rel=1e-12)
        error = wanted / math.sqrt(measured.size)
        assert abs(measured.mean()) < 5 * error, row.path
        assert abs(measured.std() - wanted) < 5 * error / math.sqrt(2), row.path


def test_every_parameter_has_its_own_values(values):
    drawn = [np.asarray(value).ravel()[:8] for path, value in values.items() if "norm" not in path]
    scaled = {tuple(np.round(value / np.abs(value).max(), 4)) for value in drawn}
    assert len(scaled) == len(drawn)
    other = flat(init_params(TABLES["everything"], jax.random.key(1)))
    assert not np.array_equal(other["embedding/weight"], values["embedding/weight"])


@pytest.fixture(scope="module")
def tiny_values():
    return flat(init_params(TINY, jax.random.key(7)))


@pytest.mark.rows(4)
@pytest.mark.parametrize(("mesh", "rules"), LAYOUTS)
def test_values_are_the_same_on_every_mesh(mesh, rules, tiny_values):
    rows = {row.path: row for row in parameter_table(TINY, rules=STATE_LAYOUTS[rules].parameters)}
    placed = init_params(
        TINY, jax.random.key(7), mesh=mesh_named(mesh), rules=STATE_LAYOUTS[rules].parameters
    )
    for path, value in flat(placed).items():
        assert value.sharding.spec == rows[path].spec
        np.testing.assert_array_equal(value, tiny_values[path], err_msg=path)


ELSEWHERE = {
    "other parts": dataclasses.replace(
        TINY,
        moe=dataclasses.replace(TINY.moe, num_shared_experts=1),
        attention=dataclasses.replace(TINY.attention, is_gated=True, qk_norm="none"),
        has_tied_embeddings=True,
    ),
    "a dense layer": dataclasses.replace(TINY, num_layers=3, dense_layers=(2,)),
}


@pytest.mark.parametrize("model", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_change_elsewhere_leaves_other_values_bitwise(model, tiny_values):
    """Only the depth reaches further: it scales what is added to the residual stream."""
    changed = flat(init_params(model, jax.random.key(7)))
    stds = {row.path: row.init_std for row in parameter_table(TINY)}
    common = [row for row in parameter_table(model) if row.path in stds]
    assert len(common) >= len(stds) - 3
    for row in common:
        if row.init_std == stds[row.path]:
            np.testing.assert_array_equal(changed[row.path], tiny_values[row.path])
        else:
            assert row.declaration.role.endswith("_out")


def test_values_have_the_requested_dtype(tiny_values):
    narrow = flat(init_params(TINY, jax.random.key(7), dtype="bfloat16"))
    for path, value in narrow.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value, tiny_values[path].astype(jnp.bfloat16))


def test_values_outside_a_model_depend_on_their_name():
    row = Declaration(shape=(64, 64), axes=("embed", "router_out"), role="router")
    drawn = draw({"a": row, "b": row}, jax.random.key(0))
    assert not np.array_equal(drawn["a"], drawn["b"])
    np.testing.assert_array_equal(drawn["a"], draw({"a": row}, jax.random.key(0))["a"])
    assert float(drawn["a"].std()) == pytest.approx(1 / 8, rel=0.05)  # 4096 values: 1.1 % each way


# Roles and parameterisations.


@every_model
def test_every_role_is_known_to_the_standard_parameterisation(model):
    assert [role for role, _ in standard(model).roles] == list(ROLES)
    assert {row.declaration.role for row in parameter_table(model)} <= set(ROLES)


def test_a_role_without_hyperparameters_is_refused():
    plain = standard(TINY)
    partial = dataclasses.replace(plain, roles=(("head", plain.of("head")),))
    text = (
        "the parameterisation has no row for the role 'embedding': add it to its `roles` (it has"
        " head)"
    )
    with refusal(text):
        partial.of("embedding")
    with refusal(f"parameter embedding/weight: {text}"):
        parameter_table(TINY, partial)


def test_a_role_named_twice_is_refused():
    plain = standard(TINY)
    with refusal(
        "the parameterisation names the role 'norm' twice in `roles`: a parameter follows one rule,"
        " so keep one of the two"
    ):
        dataclasses.replace(plain, roles=(*plain.roles, ("norm", plain.of("norm"))))


def test_a_parameterisation_reaches_the_table_and_the_values(tiny_values):
    plain = standard(TINY)
    roles = tuple(
        (role, dataclasses.replace(hyper, init_std=3.0 * hyper.init_std, group="muon"))
        for role, hyper in plain.roles
    )
    tripled = Parameterization(model=TINY, roles=roles)
    rows = {row.path: row for row in parameter_table(TINY, tripled)}
    assert {row.hyper.group for row in rows.values()} == {"muon"}
    values = flat(init_params(TINY, jax.random.key(7), parameterization=tripled))
    np.testing.assert_allclose(
        values["head/weight"], 3.0 * tiny_values["head/weight"], rtol=1e-6
    )  # one rounding of the scale


# Declarations.


def test_a_declaration_names_every_dimension():
    with refusal("2 dimensions (3, 4) but axes ('embed',)"):
        Declaration(shape=(3, 4), axes=("embed",), role="head")


def test_a_scan_puts_the_layers_in_front():
    single = Declared(
        value=None, declaration=Declaration(shape=(3, 4), axes=("embed", "vocab"), role="head")
    )
    given = {"partition_name": "layers", "size": 5}
    stacked = single.add_axis(0, given)
    assert stacked.declaration.shape == (5, 3, 4)
    assert stacked.declaration.axes == ("layers", "embed", "vocab")
    assert (stacked.declaration.fan(0), stacked.declaration.fan(1)) == (3, 4)
    assert stacked.remove_axis(0, given) == single


# Refusals.


def test_untyped_keys_are_refused():
    with refusal("init_params needs a typed key: jax.random.key(seed), not PRNGKey(seed)"):
        init_params(TINY, jax.random.PRNGKey(0))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_meshes_with_other_axes_are_refused(axis_type):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(axis_type,) * 2)
    text = (
        "init_params lays parameters out on a mesh of sharding.make_mesh (axes replica, stage,"
        " data, expert, seq, tensor), not on axes fsdp, tp: leave mesh out and place the"
        " parameters with jax.device_put"
    )
    with refusal(text):
        init_params(TINY, jax.random.key(0), mesh=mesh)


def test_a_model_that_does_not_divide_is_refused_before_values_are_made():
    model = dataclasses.replace(FULL, embed_dim=12)
    text = (
        "dense_blocks_0/attention/gate: the dimension 'embed' of size 12 must be divisible by"
        " mesh.data=8: choose a multiple of 8, another mesh, or rules that do not spread 'embed'"
    )
    with refusal(text):
        init_params(model, jax.random.key(0), mesh=make_mesh(MeshConfig(data=8)))
