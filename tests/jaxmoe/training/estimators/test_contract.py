# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Contract of the socket `Gradients` (`jaxmoe/training/estimators/base.py`), for every member."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.estimators import ESTIMATORS, Gradients
from tests.support.estimators import state_of, step_of
from tests.support.models import TINY
from tests.support.one_step import batch


@pytest.fixture(scope="module")
def table():
    return parameter_table(TINY)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_member_is_a_config_of_the_socket(name):
    member = ESTIMATORS[name]()
    assert isinstance(member, Gradients) and member.name == name
    assert member == dataclasses.replace(member) and hash(member) == hash(
        dataclasses.replace(member)
    )
    assert member.num_passes > 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_have_the_shapes_of_what_is_trained_and_the_state_its_own(name, table):
    """Traced only: each member has tests of its values."""
    member = ESTIMATORS[name]()
    step = step_of(TINY, gradients=member, clip=None, table=table)
    before = state_of(TINY, jax.tree.map(jnp.asarray, member.init(table)))
    result = jax.eval_shape(functools.partial(member.compute, step), before, batch())
    wanted = jax.eval_shape(lambda: before.params)
    assert jax.tree.structure(result.summed.grads) == jax.tree.structure(wanted)
    pairs = zip(jax.tree.leaves(result.summed.grads), jax.tree.leaves(wanted), strict=True)
    assert all(one.shape == other.shape for one, other in pairs)
    assert result.weight.shape == result.summed.loss.shape == ()
    shapes = jax.eval_shape(lambda: member.init(table))
    assert jax.tree.structure(result.state) == jax.tree.structure(shapes)
    leaves, expected = jax.tree.leaves(result.state), jax.tree.leaves(shapes)
    pairs = [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves]
    assert pairs == [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in expected]
    # The state that a member makes is on no mesh; what is traced on one is placed there.
    assert leaves == expected or not jax.sharding.get_abstract_mesh().empty
