# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the implementations of both scans with the references, and those with loops in NumPy.

To add an implementation: a name in IMPLEMENTATIONS.
"""

import functools
import inspect
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import OPERATIONS, selective_scan, state_space_dual
from tests.support.tolerances import assert_close

IMPLEMENTATIONS = ("xla",)  # and those for TPUs, in a file of their own
FUNCTIONS = {"selective_scan": selective_scan, "state_space_dual": state_space_dual}
CHUNKS = (1, 4, 7, 16, 64)
B, S = 2, 21


class Inputs(NamedTuple):
    """Arrays, their shapes, or their gradients."""

    x: Any
    dt: Any
    decay: Any
    b: Any
    c: Any
    initial: Any


def make_inputs(operation, length=S, dtype="float32", seed=0, batch=B):
    """Return inputs of small sizes: 4 heads of 3 in 2 groups, or 5 channels; 6 numbers a state."""
    keys = jax.random.split(jax.random.key(seed), 6)
    channels, groups = {"selective_scan": ((5,), ()), "state_space_dual": ((4, 3), (2,))}[operation]
    decay = (5, 6) if operation == "selective_scan" else (4,)
    row = (batch, length)
    return Inputs(
        x=jax.random.normal(keys[0], (*row, *channels)).astype(dtype),
        dt=jax.nn.softplus(jax.random.normal(keys[1], (*row, channels[0])) - 1.0),
        decay=-jnp.exp(jax.random.normal(keys[2], decay)),
        b=jax.random.normal(keys[3], (*row, *groups, 6)).astype(dtype),
        c=jax.random.normal(keys[4], (*row, *groups, 6)).astype(dtype),
        initial=jax.random.normal(keys[5], (batch, *channels, 6)),
    )


def _scan(operation, inputs, segment_ids, **options):
    *arrays, initial = inputs
    return FUNCTIONS[operation](*arrays, segment_ids=segment_ids, initial=initial, **options)


@functools.partial(
    jax.jit,
    static_argnames=("operation", "implementation", "chunk"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def value_and_gradients(inputs, segment_ids, *, operation, implementation, chunk=64):
    """Return y, the state, and gradients of all inputs for fixed gradients of both."""
    (y, state), pull = jax.vjp(
        lambda inputs: _scan(
            operation, inputs, segment_ids, implementation=implementation, chunk=chunk
        ),
        inputs,
    )
    return y, state, *pull(out_gradients(y, state))


def out_gradients(y, state):
    """Return gradients of the results that do not depend on their rounding."""
    waves = [jnp.cos(3.0 * jnp.arange(each.size, dtype=jnp.float32)) for each in (y, state)]
    return waves[0].reshape(y.shape).astype(y.dtype), waves[1].reshape(state.shape)


def _loop(operation, inputs, segment_ids):
    """Return y and the state in float64, from Python loops over rows, tokens and channels."""
    x, dt, decay, b, c, initial = (np.asarray(each, np.float64) for each in inputs)
    y, state = np.zeros(x.shape), initial.copy()
    for row in range(x.shape[0]):
        latest = None
        for token, own in enumerate(segment_ids[row]):
            if own == 0:
                continue
            if latest not in (None, own):
                state[row] = 0.0
            latest = own
            for channel in range(x.shape[2]):
                share = x.shape[2] // b.shape[2] if operation == "state_space_dual" else None
                group = () if share is None else (channel // share,)
                written, read = b[(row, token, *group)], c[(row, token, *group)]
                step = dt[row, token, channel]
                old = state[row, channel] * np.exp(step * decay[channel])
                state[row, channel] = old + step * x[row, token, channel, ..., None] * written
                y[row, token, channel] = state[row, channel] @ read
    return y, state


# Segments in order, a segment that returns, padding at the left, inside and at the right.
IDS = np.array(
    [
        [1, 1, 1, 2, 2, 2, 2, 2, 3, 1, 1, 1, 1, 1, 1, 1, 4, 4, 0, 0, 0],
        [0, 0, 7, 7, 7, 0, 0, 7, 7, 2, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3],
    ],
    np.int32,
)


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_every_implementation_is_in_the_table(operation):
    implementations = set(OPERATIONS[operation].implementations)
    kernels = {"state_space_dual": {"pallas_tpu"}, "selective_scan": set()}
    assert implementations == {"reference", *IMPLEMENTATIONS} | kernels[operation]


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_reference_against_loops(operation):
    inputs = make_inputs(operation)
    actual = value_and_gradients(
        inputs, jnp.asarray(IDS), operation=operation, implementation="reference"
    )[:2]
    expected = _loop(operation, inputs, IDS)
    assert_close(actual, tuple(each.astype(np.float32) for each in expected), "matmul")


@st.composite
def rows_of_ids(draw):
    """Segment ids of any order, with padding anywhere."""
    lengths = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8)
    rows = []
    for _ in range(B):
        row = [one for one, number in draw(lengths) for _ in range(number)][:S]
        rows.append(row + [draw(st.integers(0, 2))] * (S - len(row)))
    return np.array(rows, np.int32)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parity(implementation, operation, chunk):
    """Value and gradient of all inputs, over drawn borders and padding; one program serves all."""

    @settings(max_examples=8)
    @given(ids=rows_of_ids(), seed=st.integers(0, 3))
    def check(ids, seed):
        inputs, ids = make_inputs(operation, seed=seed), jnp.asarray(ids)
        actual, expected = (
            value_and_gradients(inputs, ids, operation=operation, implementation=name, chunk=size)
            for name, size in ((implementation, chunk), ("reference", 64))
        )
        assert_close(actual, expected, "matmul")

    check()


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parity_in_bfloat16(implementation, operation):
    inputs = make_inputs(operation, dtype="bfloat16")
    y, state, gradients = value_and_gradients(
        inputs, jnp.asarray(IDS), operation=operation, implementation=implementation, chunk=7
    )
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    assert [each.dtype for each in gradients] == [each.dtype for each in inputs]
    expected = value_and_gradients(
        inputs, jnp.asarray(IDS), operation=operation, implementation="reference"
    )
    assert_close((y, state, gradients), expected, "end_to_end", "bfloat16")


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_row_without_ids_is_one_segment_from_zero(implementation, operation):
    inputs = make_inputs(operation)
    options = {"implementation": implementation, "chunk": 4}
    alone = FUNCTIONS[operation](*inputs[:-1], **options)
    inputs = inputs._replace(initial=jnp.zeros_like(inputs.initial))
    assert_close(alone, _scan(operation, inputs, jnp.ones((B, S), jnp.int32), **options), "matmul")


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_state_that_is_handed_over(implementation, operation):
    """Cuts within a segment, at padding, and token by token, give what one call gives."""
    inputs, ids = make_inputs(operation), np.ones((B, S), np.int32)
    ids[0, 5:8], ids[1, 18:] = 0, 0
    bordered = np.array(ids)
    bordered[:, :3] = 3
    scan = jax.jit(
        functools.partial(_scan, operation, implementation=implementation, chunk=4),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    for cuts, own in (((0, 7, 14, S), bordered), (range(S + 1), ids)):
        whole = scan(inputs, jnp.asarray(own))
        outs, state = [], inputs.initial
        for start, stop in itertools.pairwise(cuts):
            x, dt, b, c = (each[:, start:stop] for each in (*inputs[:2], *inputs[3:5]))
            part = Inputs(x, dt, inputs.decay, b, c, state)
            y, state = scan(part, jnp.asarray(own[:, start:stop]))
            outs.append(y)
        assert_close((jnp.concatenate(outs, axis=1), state), whole, "matmul")


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_padding_is_zero_and_changes_nothing(implementation, operation):
    """A row of padding keeps the state, and gives no gradients but that of the state."""
    inputs, ids = make_inputs(operation), np.array(IDS)
    ids[0] = 0
    y, state, gradients = value_and_gradients(
        inputs, jnp.asarray(ids), operation=operation, implementation=implementation, chunk=4
    )
    assert not np.any(y[0]) and not np.any(np.asarray(y)[ids == 0])
    np.testing.assert_array_equal(state[0], inputs.initial[0])
    for name in ("x", "dt", "b", "c"):
        assert not np.any(getattr(gradients, name)[0]), name
    np.testing.assert_array_equal(gradients.initial[0], out_gradients(y, state)[1][0])


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fast_decay_within_long_chunks(implementation, operation):
    """Sums of 3000 within a chunk neither overflow nor hide what comes behind them."""
    inputs = make_inputs(operation)
    inputs = inputs._replace(dt=inputs.dt.at[:, 5:8].set(1000.0), decay=inputs.decay - 1.0)
    actual, expected = (
        value_and_gradients(inputs, jnp.asarray(IDS), operation=operation, implementation=name)
        for name in (implementation, "reference")
    )
    assert all(bool(jnp.all(jnp.isfinite(each))) for each in jax.tree.leaves(actual))
    # Sums of up to 9000 are rounded to 1e-3, and so are logarithms of the tokens behind them.
    assert_close(actual[:2], expected[:2], "end_to_end", "bfloat16")


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_memory_of_the_gradient_is_one_state_per_chunk(operation):
    """Further tokens cost a few copies of the inputs and a state per chunk, not one per token."""
    temporary = {}
    for length in (128, 512):
        inputs = jax.eval_shape(functools.partial(make_inputs, operation, length, batch=1))
        lowered = jax.jit(
            jax.grad(lambda inputs: jnp.sum(_scan(operation, inputs, None, chunk=64)[0]))
        ).lower(inputs)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        temporary[length] = memory.temp_size_in_bytes
    one_state = inputs.initial.size * 4
    arrays = sum(each.size * 4 for each in inputs[:5])
    assert temporary[512] - temporary[128] < 3 * arrays + 2 * (512 / 64) * one_state


@pytest.mark.parametrize("operation", FUNCTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_in_shard_map(implementation, operation):
    """With sharded rows and one replicated decay, the gradient of the decay is summed."""
    inputs = make_inputs(operation, length=9)
    ids = jnp.asarray(IDS[:, :9])
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = Inputs._make(P() if name == "decay" else P("rows") for name in Inputs._fields)
    scan = jax.shard_map(
        lambda inputs, ids: _scan(operation, inputs, ids, implementation=implementation, chunk=4),
        mesh=mesh,
        in_specs=(specs, P("rows")),
        out_specs=P("rows"),
    )

    @jax.jit
    def run(inputs):
        (y, state), pull = jax.vjp(lambda inputs: scan(inputs, ids), inputs)
        return y, state, *pull(out_gradients(y, state))

    with jax.set_mesh(mesh):
        actual = run(inputs)
    expected = value_and_gradients(inputs, ids, operation=operation, implementation="reference")
    assert_close(actual, expected, "matmul")


def test_no_tokens():
    inputs = make_inputs("state_space_dual", length=0)
    y, state = _scan("state_space_dual", inputs, None)
    assert y.shape == inputs.x.shape
    np.testing.assert_array_equal(state, inputs.initial)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt": jnp.zeros((B, S, 3))}, r"dt must be \[B=2 S=21 N=4\], not \[2, 21, 3\]"),
        ({"dt": jnp.zeros((B, S, 4), jnp.bfloat16)}, "dt must be float32, not bfloat16"),
        ({"x": jnp.zeros((B, S, 4, 3), jnp.bfloat16)}, "x, b and c must have one floating dtype"),
        ({"b": jnp.zeros((B, S, 3, 6)), "c": jnp.zeros((B, S, 3, 6))}, r"groups .* \(3\) must div"),
        ({"initial": jnp.zeros((B, 4, 3, 5))}, r"initial must be float32 \[2, 4, 3, 6\], not"),
        ({"segment_ids": jnp.zeros((B, 4), jnp.int32)}, r"segment_ids must be integers \[B S\]"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    given = make_inputs("state_space_dual")._asdict() | change
    order = [given.pop(name) for name in ("x", "dt", "decay", "b", "c")]
    with pytest.raises(ValueError, match=message):
        # Without the type checks of tests, as users do.
        inspect.unwrap(state_space_dual)(*order, **given)
