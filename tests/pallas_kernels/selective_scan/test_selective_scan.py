# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Recurrences in chunks against one position after the other, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import OPERATIONS, selective_scan, state_space_dual
from tests.support.tolerances import assert_close

ROWS, LENGTH = 2, 13
CHUNKS = (1, 4, 7, 16)


def drawn(name, length=LENGTH, values=5):
    """Inputs, the state before them last."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    if name == "state_space_dual":
        shapes = ((4, 3), (4,), (4,), (2, values), (2, values), (4, 3, values))
    else:
        shapes = ((6,), (6,), (6, values), (values,), (values,), (6, values))
    x, dt, decay, b, c, state = (
        normal(*shape) if place == 2 else normal(ROWS, *(() if place == 5 else (length,)), *shape)
        for place, shape in enumerate(shapes)
    )
    return x, np.log1p(np.exp(dt)), -np.exp(decay), b, c, state


CALLS = {"state_space_dual": state_space_dual, "selective_scan": selective_scan}
every_scan = pytest.mark.parametrize("name", CALLS)


@functools.cache
def value_and_gradient(name, implementation, chunk):
    """Return a jitted function of the inputs and segments."""

    def total(given, segments):
        *arrays, state = given
        y, last = CALLS[name](
            *arrays,
            segment_ids=segments,
            initial=state,
            chunk=chunk,
            implementation=implementation,
        )
        is_real = (segments != 0).reshape(*segments.shape, *(1,) * (y.ndim - 2))
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        y = jnp.where(is_real, y, 0.0)
        return jnp.sum(y * weights) + jnp.sum(jnp.sin(last)), (y, last)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def test_every_operation_has_its_row():
    assert {"state_space_dual", "selective_scan"} <= OPERATIONS.keys()
    for name in CALLS:
        assert OPERATIONS[name].implementations.keys() == {"reference", "xla"}


@every_scan
@settings(max_examples=12, deadline=None)
@given(
    segments=st.lists(
        st.lists(st.integers(0, 3), min_size=LENGTH, max_size=LENGTH), min_size=ROWS, max_size=ROWS
    ),
    chunk=st.sampled_from(CHUNKS),
)
def test_chunks_equal_one_position_after_the_other(name, segments, chunk):
    """Borders and padding anywhere; gradients of all inputs and of the state before them."""
    ids = jnp.asarray(segments, jnp.int32)
    wanted = value_and_gradient(name, "reference", 1)(drawn(name), ids)
    found = value_and_gradient(name, "xla", chunk)(drawn(name), ids)
    assert_close(found, wanted, "end_to_end")


@every_scan
def test_the_reference_equals_a_loop_in_numpy(name):
    x, dt, decay, b, c, state = (np.asarray(part, np.float64) for part in drawn(name))
    segments = np.array([[1] * 5 + [2] * 6 + [0] * 2, [0, 0, 3] + [3] * 5 + [4] * 5], np.int32)
    out, last = np.zeros_like(x), state.copy()
    for row in range(ROWS):
        h, document = state[row].copy(), None
        for t in range(LENGTH):
            if segments[row, t] == 0:
                continue
            if document not in (None, segments[row, t]):
                h[:] = 0.0
            document = segments[row, t]
            if name == "selective_scan":
                h = np.exp(dt[row, t][:, None] * decay) * h
                h += (dt[row, t] * x[row, t])[:, None] * b[row, t][None]
                out[row, t] = h @ c[row, t]
                continue
            for head in range(4):
                group = head // 2
                h[head] *= np.exp(dt[row, t, head] * decay[head])
                h[head] += dt[row, t, head] * np.outer(x[row, t, head], b[row, t, group])
                out[row, t, head] = h[head] @ c[row, t, group]
        last[row] = h
    _, (y, found) = value_and_gradient(name, "reference", 1)(drawn(name), jnp.asarray(segments))[0]
    is_real = (segments != 0).reshape(*segments.shape, *(1,) * (x.ndim - 2))
    assert_close(y, np.where(is_real, out, 0.0), "end_to_end")
    assert_close(found, last, "end_to_end")


@every_scan
def test_two_calls_that_hand_over_the_state_equal_one(name):
    *arrays, _ = map(jnp.asarray, drawn(name))

    @jax.jit
    def both(arrays):
        run = functools.partial(CALLS[name], chunk=4, implementation="xla")
        y, last = run(*arrays)
        parts, state = [], None
        for cut in (slice(0, 6), slice(6, 7), slice(7, LENGTH)):
            x, dt, decay, b, c = arrays
            part, state = run(x[:, cut], dt[:, cut], decay, b[:, cut], c[:, cut], initial=state)
            parts.append(part)
        return (y, last), (jnp.concatenate(parts, axis=1), state)

    whole, joined = both(arrays)
    assert_close(joined, whole, "end_to_end")


@every_scan
def test_the_memory_of_a_gradient_grows_with_the_chunks_only(name):
    """No state of every position, nor a number for each pair of positions."""
    length = 2048
    arrays = tuple(map(jnp.asarray, drawn(name, length, values=64)))
    ids = jnp.ones((ROWS, length), jnp.int32)
    memory = value_and_gradient(name, "xla", 32).lower(arrays, ids).compile().memory_analysis()
    states = arrays[-1].nbytes * length
    assert memory.temp_size_in_bytes < states


def test_bad_arguments_are_refused():
    *arrays, _ = map(jnp.asarray, drawn("state_space_dual"))
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        state_space_dual(*arrays, chunk=0)
    x, dt, decay, b, c = arrays
    with pytest.raises(ValueError, match="3 heads are no multiple of 2 groups"):
        state_space_dual(x[:, :, :3], dt[:, :, :3], decay[:3], b, c)
