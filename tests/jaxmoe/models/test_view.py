# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parameters rewritten inside the scan over layers against the same rewriting outside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.view import View, view_outside
from jaxmoe.models.config import AttentionConfig, LayerConfig
from jaxmoe.models.transformer import forward
from jaxmoe.scaling.initialize import parameter_table
from tests.support.models import FULL, TINY, tokens_for
from tests.support.one_step import params_of

WINDOWED = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=6, window=3)
CYCLE = dataclasses.replace(TINY, num_layers=4, layers=(LayerConfig(mixer=WINDOWED), LayerConfig()))


def _rewrite(params, own, part):
    del part
    return jax.tree.map(
        lambda p, scale, shift: p * (1.0 + scale) + shift, params, own["scale"], own["shift"]
    )


def _own(model, seed):
    """A factor for each parameter of each layer, and a shift of its shape."""
    rng = np.random.default_rng(seed)

    def scale(row):
        shape = row.shape[:1] if row.declaration.is_stacked else ()
        return jnp.asarray(0.1 * rng.standard_normal(shape), jnp.float32)

    def shift(row):
        return jnp.asarray(0.01 * rng.standard_normal(row.shape), jnp.float32)

    table = parameter_table(model)
    scales, shifts = table.tree(scale), table.tree(shift)
    return scales, shifts


def _paired(model, scales, shifts):
    """The own parameters of the view: two trees for each layer, by place in a period."""

    def of(name):
        scan = next((scan for scan in model.scans if scan.name == name), None)
        if scan is not None and scan.is_cycle:
            return {
                place: {"scale": scales[name][place], "shift": shifts[name][place]}
                for place in scales[name]
            }
        return {"scale": scales[name], "shift": shifts[name]}

    return {name: of(name) for name in scales}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "cycle"])
def test_view_inside_the_scan_equals_rewriting_outside(name):
    model = {"full": FULL, "cycle": CYCLE}[name]
    params, tokens = params_of(model), tokens_for(model)[0]
    assert any(scan.is_cycle for scan in model.scans) == (name == "cycle")

    def inside(params, own, remat):
        scales, shifts = own
        view = View(rewrite=_rewrite, own=_paired(model, scales, shifts))
        params, layers = view_outside(params, view, [scan.name for scan in model.scans])
        execution = ExecutionConfig(remat=remat)
        return jnp.sum(jnp.sin(forward(model, execution, params, tokens, view=layers).logits))

    def outside(params, own):
        wide = jax.tree.map(
            lambda p, s, d: p * (1.0 + s.reshape(s.shape + (1,) * (p.ndim - s.ndim))) + d,
            params,
            *own,
        )
        return jnp.sum(jnp.sin(forward(model, ExecutionConfig(), wide, tokens).logits))

    own = _own(model, 3)
    value, found = jax.jit(jax.value_and_grad(outside, (0, 1)))(params, own)
    for remat in ("none", "full"):
        grad = jax.jit(jax.value_and_grad(lambda p, o, r=remat: inside(p, o, r), (0, 1)))
        same, grads = grad(params, own)
        np.testing.assert_allclose(same, value, rtol=1e-5)
        apart = jax.tree.map(lambda one, other: jnp.max(jnp.abs(one - other)), grads, found)
        largest = jax.tree.map(lambda x: jnp.max(jnp.abs(x)), found)
        assert float(max(jax.tree.leaves(apart))) <= 2e-6 * float(max(jax.tree.leaves(largest)))


def test_view_is_refused_where_parameters_are_gathered():
    params, tokens = params_of(TINY), tokens_for(TINY)[0]
    view = View(rewrite=_rewrite, own={})
    with pytest.raises(ValueError, match=r"rules=zero2 gathers .* set execution.rules to"):
        forward(TINY, ExecutionConfig(rules="zero2"), params, tokens, view=view)
