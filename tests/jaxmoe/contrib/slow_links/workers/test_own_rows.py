# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A worker's optimiser of its own rows makes the updates of one that holds all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links.fragments import Leaf
from jaxmoe.contrib.slow_links.ownership import Ownership
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.contrib.slow_links.workers.own_rows import OwnRows
from sharding import axes as ax

LEAF = Leaf("experts", (2, 5, 3), (ax.LAYERS, ax.EXPERTS, None), "expert_in", True)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_updates_of_own_rows_are_those_of_all_rows(workers):
    """Also where five experts are divided among two or three workers."""
    owned, inner = Ownership(workers=workers, axis=ax.EXPERTS), optax.adamw(0.1)
    rows = OwnRows(optimizer=inner, ownership=owned, leaves={"experts": LEAF})
    rng = np.random.default_rng(0)

    def drawn():
        shapes = {"experts": LEAF.shape, "norm": (4,)}
        return {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}

    params = drawn()
    states = rows.begin(Workers(workers, is_spread=False), params, inner.init(params))
    assert states[0].mu["experts"].shape == (workers, 2, owned.most(5), 3)
    assert states[0].mu["norm"].shape == (workers, 4)
    given = [drawn() for _ in range(2)]
    seen = np.zeros(5, int)
    for worker in range(workers):
        own = owned.mask(LEAF, jnp.int32(worker))
        assert own is not None
        seen += np.asarray(own)[0, :, 0]
        few, whole = jax.tree.map(lambda x, w=worker: x[w], states), inner.init(params)
        for grads in given:
            grads = grads | {"experts": jnp.where(own, grads["experts"], 0.0)}
            with jax.numpy_dtype_promotion("standard"):
                got, few = rows.of(jnp.int32(worker)).update(grads, few, params)
                wanted, whole = inner.update(grads, whole, params)
            for path in wanted:
                mask = own if path == "experts" else True
                one, other = (np.where(mask, tree[path], 0.0) for tree in (got, wanted))
                np.testing.assert_allclose(one, other, rtol=1e-6)
    assert (seen == 1).all()
