# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Specs for foreign trees: one sum per block on Llama, T5 and GPT-J; names, turns, refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmoe.contrib.foreign_models.specs import foreign_mesh, foreign_specs
from jaxmoe.planning.hlo import collectives
from sharding.mesh import named_shardings
from tests.support.collective_counts import counts
from tests.support.foreign_models import FOREIGN

COLUMNS, ROWS, WHOLE = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None), PartitionSpec()


def specs(tree, tensor=4, **options):
    arrays = jax.tree.map(np.zeros, tree, is_leaf=lambda node: isinstance(node, tuple))
    return foreign_specs(arrays, tensor, **options)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("tensor", [2, 4])
def test_one_sum_per_block(name, tensor, key):
    init, forward, sums = FOREIGN[name]
    mesh = foreign_mesh(tensor=tensor)
    params = jax.eval_shape(init, key)
    named = named_shardings(foreign_specs(params, tensor), mesh)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    run = jax.jit(
        forward,
        in_shardings=(named, rows),
        out_shardings=NamedSharding(mesh, PartitionSpec("data", None, "tensor")),
    )
    text = run.lower(params, jax.ShapeDtypeStruct((8, 12), jnp.int32)).compile().as_text()
    assert counts(collectives(text)) == {"all-reduce": sums}


@pytest.mark.parametrize("name", FOREIGN)
def test_every_large_matrix_is_split(name, key):
    params = jax.eval_shape(FOREIGN[name][0], key)
    named = jax.tree_util.tree_leaves_with_path(params)
    found = jax.tree.leaves(foreign_specs(params, 4), is_leaf=lambda x: isinstance(x, jax.P))
    for (path, leaf), spec in zip(named, found, strict=True):
        is_small = leaf.ndim < 2 or "relative_attention_bias" in jax.tree_util.keystr(path)
        assert (spec == WHOLE) == is_small


def test_split_by_name_or_alternately():
    found = specs(
        {
            "attn": {"q": (8, 8), "k": (8, 2), "o": {"w": (8, 8)}},
            "heads_attention": {"query": {"kernel": (8, 4, 2)}, "out": {"kernel": (4, 2, 8)}},
            "gpt2_attn": {"c_attn": {"kernel": (8, 24)}, "c_proj": {"kernel": (8, 8)}},
            "mlp": [{"weight": (8, 16)}, {"weight": (16, 16)}, {"weight": (16, 8)}],
            "experts": {"up": (6, 8, 16), "down": (6, 16, 8)},
            "embed": {"embedding": (8, 5)},
            "odd": {"up": (8, 6)},
            "norm": {"scale": (8,)},
            "moe": {"router": {"kernel": (8, 8)}},
        }
    )
    assert found["attn"] == {"q": COLUMNS, "k": WHOLE, "o": {"w": ROWS}}
    assert found["heads_attention"]["query"]["kernel"] == PartitionSpec(None, "tensor", None)
    assert found["heads_attention"]["out"]["kernel"] == PartitionSpec("tensor", None, None)
    assert [leaf["kernel"] for leaf in found["gpt2_attn"].values()] == [COLUMNS, ROWS]
    assert [leaf["weight"] for leaf in found["mlp"]] == [COLUMNS, ROWS, COLUMNS]
    assert found["experts"]["up"] == PartitionSpec(None, None, "tensor")
    assert found["experts"]["down"] == PartitionSpec(None, "tensor", None)
    assert found["embed"]["embedding"] == ROWS
    assert {*jax.tree.leaves([found["odd"], found["norm"], found["moe"]])} == {WHOLE}


def test_overrides_take_precedence():
    tree = {"layers": [{"q": (8, 8)}, {"q": (8, 8)}]}
    found = specs(tree, overrides={r"layers/1/.*": ROWS, "q": WHOLE})
    assert [layer["q"] for layer in found["layers"]] == [WHOLE, ROWS]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"kq": ROWS},
            "overrides['kq'] is found in no path of the parameters: they are called a/q and so on",
        ),
        (
            {"q": PartitionSpec(None, None, "tensor")},
            "overrides: P(None, None, 'tensor') has 3 entries, and a/q has 2 dimensions",
        ),
        (
            {"q": ROWS},
            "overrides: a/q has a dimension of 6, which must be divisible by tensor=4 to be split",
        ),
    ],
)
def test_overrides_that_do_not_fit_raise(overrides, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        specs({"a": {"q": (6, 8)}}, overrides=overrides)


def test_foreign_mesh_has_auto_axes():
    mesh = foreign_mesh(tensor=2)
    assert mesh.shape == {"data": 4, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    with pytest.raises(ValueError, match="^tensor=3 must divide the 8 devices: choose one of 1, 2"):
        foreign_mesh(tensor=3)
