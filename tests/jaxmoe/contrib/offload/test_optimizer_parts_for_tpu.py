# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Memory of an update in parts, compiled for eight described TPUs.

64 matrices of 1024 x 1024 with Adam's two moments: 64 MiB of state on each device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.contrib.offload.optimizer_parts import Module, update_in_parts
from jaxmoe.optim import adamw
from tests.support.tpus import described_tpus

LAYERS, WIDTH, MIB = 64, 1024, 2**20
STATE = 2 * LAYERS * WIDTH * WIDTH * 4 // 8 // MIB


def compiled(mesh, number):
    """The update in a number of equal parts, or that of the whole state for 0."""
    optimizer = adamw(1e-3)

    def shaped(leaf, kind=None):
        spec = P(None, "data") if leaf.ndim == 3 else P()
        given = NamedSharding(mesh, spec, memory_kind=kind if leaf.ndim else None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given)

    weights = {"layers": {"w": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)}}
    state = jax.tree.map(
        lambda x: shaped(x, "pinned_host"), jax.eval_shape(optimizer.init, weights)
    )
    params = jax.tree.map(shaped, weights)
    norm = shaped(jax.ShapeDtypeStruct((), jnp.float32))

    def update(params, state, grads, norm):
        if number:
            modules = (Module("layers", number),)
            _, new, after = update_in_parts(
                optimizer.update, modules, grads, state, params, after=(norm, norm)
            )
            good = after.is_finite & jnp.isfinite(norm)
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, params), after.kept(good)
        fetched = jax.device_put(state, jax.memory.Space.Device)
        steps, after = optimizer.update(grads, fetched, params)
        new = jax.tree.map(jnp.add, params, steps)
        sums = [jnp.sum(0 * leaf) for leaf in jax.tree.leaves((new, after)) if leaf.ndim]
        good = jnp.isfinite(sum(sums)) & jnp.isfinite(norm)
        new, after = jax.tree.map(
            lambda n, o: jnp.where(good, n, o), (new, after), (params, fetched)
        )
        back = jax.tree.map(
            lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, after
        )
        return new, back

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(update, donate_argnums=(0, 1)).trace(params, state, params, norm)
    return lowered.lower().compile()


@pytest.mark.slow
def test_two_parts_of_the_state_are_on_the_device(monkeypatch):
    devices = described_tpus(monkeypatch, "v5e:2x4")
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Explicit,))
    used = {number: compiled(mesh, number) for number in (0, 8)}
    temporaries = {
        number: program.memory_analysis().temp_size_in_bytes / MIB
        for number, program in used.items()
    }
    assert temporaries[0] > STATE
    # The gradients are arguments here, so that new parameters have memory of their own.
    assert temporaries[8] - STATE / 2 < 2.2 / 8 * STATE
    text = used[8].as_text()
    # Two moments of a part arrive and leave by asynchronous copies in the loop.
    (body,) = (part for part in text.split("\n\n") if "dynamic-update-slice-start(" in part)
    for name in ("dynamic-slice-start", "dynamic-update-slice-start"):
        assert sum(f"{name}(" in line for line in body.splitlines()) >= 2
