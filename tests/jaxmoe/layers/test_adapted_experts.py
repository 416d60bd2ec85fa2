# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Experts with low-rank additions: what their compiled gradient holds, and its values."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.layers.feed_forwards.moe import experts
from sharding.products.low_rank import LowRank

GROUPS, WIDTH, HIDDEN, RANK, ROWS = 4, 40, 24, 2, 256
SIZES = (100, 30, 0, 80)


def _compile_gradients(has_additions):
    """Return the compiled gradients of additions and rows, beside frozen weights; and arguments."""
    shapes = {
        "gate_up": (GROUPS, WIDTH, 2, HIDDEN),
        "down": (GROUPS, HIDDEN, WIDTH),
        "gate_up:down": (GROUPS, WIDTH, RANK),
        "gate_up:up": (GROUPS, RANK, 2, HIDDEN),
        "down:down": (GROUPS, HIDDEN, RANK),
        "down:up": (GROUPS, RANK, WIDTH),
        "rows": (ROWS, WIDTH),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = zip(shapes.items(), keys, strict=True)
    arrays = {name: jax.random.normal(key, shape) for (name, shape), key in draw}
    trained = {name: arrays.pop(name) for name in list(arrays) if ":" in name or name == "rows"}

    def adapt(name, frozen, trained):
        if not has_additions:
            return frozen[name]
        factors = {part: trained[f"{name}:{part}"] for part in ("down", "up")}
        return LowRank(weight=frozen[name], **factors, scale=jnp.float32(0.5))

    def loss(trained, frozen):
        weights = {name: adapt(name, frozen, trained) for name in frozen}
        sizes = jnp.array(SIZES, jnp.int32)
        return jnp.sum(jnp.square(experts.apply_experts(weights, trained["rows"], sizes)))

    lowered = jax.jit(jax.grad(loss)).lower(trained, arrays)
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})
    return compiled, (trained, arrays)


def test_adapted_experts_are_laid_out_once(monkeypatch):
    """As many loops over blocks as without additions, no copy or gradient of a frozen weight; equal
    to additions that are products of their own, as beside the kernels of a TPU."""
    adapted, arguments = _compile_gradients(has_additions=True)
    plain, _ = _compile_gradients(has_additions=False)
    loops = [program.as_text().count(" while(") for program in (adapted, plain)]
    assert loops[0] == loops[1] > 0
    for shape in ("4,40,48", "4,40,2,24", "4,24,40"):
        operations = set(re.findall(rf"= f32\[{shape}\]\S* ([\w-]+)\(", adapted.as_text()))
        assert operations <= {"parameter", "bitcast", "get-tuple-element"}, shape

    monkeypatch.setattr(experts, "adds_factors", lambda implementation: False)
    composed, _ = _compile_gradients(has_additions=True)
    assert composed.as_text().count(" while(") > 3 * loops[0]
    most = 0.8 * composed.memory_analysis().temp_size_in_bytes
    assert adapted.memory_analysis().temp_size_in_bytes < most
    for x, y in zip(*(jax.tree.leaves(f(*arguments)) for f in (adapted, composed)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
