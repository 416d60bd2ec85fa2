# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares every implementation of grouped_matmul with the reference, ragged_dot and numpy.

To add an implementation: a name in IMPLEMENTATIONS. To add a case: a row in CASES.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import OPERATIONS, grouped_matmul
from pallas_kernels.grouped_matmul import layout

IMPLEMENTATIONS = ("xla",)  # and those for TPUs and GPUs, in files of their own

# Sums of up to 16 float32 products of unit normals, or of 64 rows in the gradient of the weights;
# bfloat16 keeps 8 bits.
TOLERANCES = {
    "float32": {"rtol": 1e-5, "atol": 1e-4},
    "bfloat16": {"rtol": 2e-2, "atol": 1e-1},
}

# rows, group sizes. The head of 64 rows and 4 groups holds 32 rows of each (MIN_HEADS); with small
# constants (see `small_blocks`) 17 rows, and blocks of 8 and 4.
CASES = {
    "balanced": (64, [16, 16, 16, 16]),
    "skewed": (64, [50, 3, 0, 11]),
    "first_overflows": (64, [64, 0, 0, 0]),
    "last_overflows": (64, [0, 0, 0, 64]),
    "one_group": (64, [64]),
    "one_short_group": (64, [7]),
    "all_empty": (64, [0, 0, 0, 0]),
    "below_head": (64, [16, 16, 16, 16]),
    "at_head": (64, [17, 17, 15, 15]),
    "above_head": (64, [18, 18, 14, 14]),
    "one_below_large_block": (64, [24, 24, 0, 16]),
    "one_above_large_block": (64, [26, 26, 1, 11]),
    "padding": (64, [20, 0, 9, 4]),
    "padding_after_overflow": (64, [2, 1, 40, 0]),
    "one_row": (1, [0, 1, 0]),
    "fewer_rows_than_groups": (3, [1, 0, 0, 1, 0]),
}


@pytest.fixture(params=[False, True], ids=["default", "small_blocks"])
def small_blocks(request, monkeypatch):
    """Shrink constants so that these shapes reach every branch."""
    if request.param:
        monkeypatch.setattr(layout, "BLOCKS", (8, 4))
        monkeypatch.setattr(layout, "MIN_HEADS", (4,))


def _inputs(num_rows, sizes, dtype="float32"):
    keys = jax.random.split(jax.random.key(num_rows), 3)
    rows = jax.random.normal(keys[0], (num_rows, 12))
    weights = jax.random.normal(keys[1], (len(sizes), 12, 10))
    d_out = jax.random.normal(keys[2], (num_rows, 10))
    # Must not be read.
    rows = rows.at[sum(sizes) :].set(jnp.nan)
    d_out = d_out.at[sum(sizes) :].set(jnp.inf)
    rows, weights, d_out = (x.astype(dtype) for x in (rows, weights, d_out))
    return rows, weights, jnp.array(sizes, jnp.int32), d_out


def _value_and_gradients(rows, weights, group_sizes, d_out, implementation):
    constants = (layout.BLOCKS, layout.MIN_HEADS, layout.SLACK)
    return _compiled(rows, weights, group_sizes, d_out, implementation, constants)


# Compiling small programs takes most of the time; other tests optimise as users do.
@functools.partial(
    jax.jit, static_argnums=(4, 5), compiler_options={"xla_backend_optimization_level": 0}
)
def _compiled(rows, weights, group_sizes, d_out, implementation, constants):
    """Return a compiled program; the unread `constants` keep programs apart."""
    del constants
    out, pull = jax.vjp(
        lambda r, w: grouped_matmul(r, w, group_sizes, implementation=implementation),
        rows,
        weights,
    )
    return out, *pull(d_out)


def test_every_implementation_is_in_the_table():
    assert set(OPERATIONS["grouped_matmul"].implementations) == {
        "reference",
        *IMPLEMENTATIONS,
        "pallas_tpu",
        "pallas_gpu",
    }


def _of_numpy(rows, weights, group_sizes, d_out):
    expected = np.zeros(d_out.shape, np.float32)
    for row, group in enumerate(np.repeat(np.arange(len(group_sizes)), group_sizes)):
        expected[row] = np.asarray(rows[row]) @ np.asarray(weights[group])
    return expected


@pytest.mark.rows(8)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parity(implementation, case, small_blocks):
    inputs = _inputs(*CASES[case])
    actual = _value_and_gradients(*inputs, implementation)
    expected = _value_and_gradients(*inputs, "reference")
    np.testing.assert_allclose(expected[0], _of_numpy(*inputs), **TOLERANCES["float32"])
    for name, x, y in zip(("out", "d_rows", "d_weights"), actual, expected, strict=True):
        np.testing.assert_allclose(x, y, err_msg=name, **TOLERANCES["float32"])
    used = int(inputs[2].sum())
    for x in (actual[0], actual[1], expected[0], expected[1]):
        assert not np.any(x[used:]), "rows past the last group must be exactly 0"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parity_in_bfloat16(implementation):
    inputs = _inputs(*CASES["skewed"], dtype="bfloat16")
    actual = _value_and_gradients(*inputs, implementation)
    expected = _value_and_gradients(*inputs, "reference")
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        x, y = (z.astype(jnp.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, **TOLERANCES["bfloat16"])


@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_against_ragged_dot(implementation):
    rows, weights, group_sizes, d_out = _inputs(*CASES["skewed"])
    out, pull = jax.vjp(lambda r, w: jax.lax.ragged_dot(r, w, group_sizes), rows, weights)
    actual = _value_and_gradients(rows, weights, group_sizes, d_out, implementation)
    for x, y in zip(actual, (out, *pull(d_out)), strict=True):
        np.testing.assert_allclose(x, y, **TOLERANCES["float32"])


def test_heads_are_small_for_few_rows_and_as_large_as_a_group_for_many():
    """Decoding reads each matrix for few rows; groups of training have the heads of their size."""
    rows_of = {(32, 16): 8, (64, 16): 8, (128, 16): 16, (160, 16): 16, (288, 16): 32, (3, 5): 3}
    for (num_rows, num_groups), head in rows_of.items():
        assert layout.head_size(num_rows, num_groups) == head
    for mean in (22, 30, 32, 64, 1000):
        assert layout.head_size(16 * mean, 16) == max(32, int(mean * (1 + layout.SLACK)))


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_any_sizes(sizes):
    """One compiled function serves all sizes."""
    rows, weights, _, d_out = _inputs(40, [40, 0, 0, 0, 0])
    group_sizes = jnp.array(np.diff(np.minimum(np.cumsum([0, *sizes]), 40)), jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCKS", (8, 4))
        patch.setattr(layout, "MIN_HEADS", (4,))
        actual, expected = (
            _value_and_gradients(rows, weights, group_sizes, d_out, name)
            for name in ("xla", "reference")
        )
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, **TOLERANCES["float32"])


def test_no_rows():
    rows, weights, group_sizes, d_out = _inputs(0, [0, 0])
    out, d_rows, d_weights = _value_and_gradients(rows, weights, group_sizes, d_out, None)
    assert out.shape == (0, 10)
    assert d_rows.shape == (0, 12)
    assert not np.any(d_weights)


@pytest.mark.parametrize(
    ("implementation", "check_vma", "axis_type"),
    [
        ("reference", True, AxisType.Auto),
        ("reference", False, AxisType.Explicit),
        *((name, True, AxisType.Explicit) for name in IMPLEMENTATIONS),
        *((name, False, AxisType.Auto) for name in IMPLEMENTATIONS),
    ],
)
def test_in_shard_map(implementation, check_vma, axis_type):
    """With sharded rows and replicated weights, gradients of weights are summed."""
    parts = [_inputs(*CASES[name]) for name in ("balanced", "skewed", "padding", "all_empty")]
    weights = parts[0][1]
    expected = [_value_and_gradients(r, weights, g, d, "reference") for r, _, g, d in parts]
    rows, group_sizes, d_out = (jnp.concatenate([part[i] for part in parts]) for i in (0, 2, 3))

    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(axis_type,))
    apply = jax.shard_map(
        lambda r, w, g: grouped_matmul(r, w, g, implementation=implementation),
        mesh=mesh,
        in_specs=(P("tokens"), P(), P("tokens")),
        out_specs=P("tokens"),
        check_vma=check_vma,
    )

    with jax.set_mesh(mesh):
        rows, group_sizes, d_out = (
            jax.device_put(x, jax.NamedSharding(mesh, P("tokens")))
            for x in (rows, group_sizes, d_out)
        )

        @jax.jit
        def run(rows, weights, group_sizes, d_out):
            out, pull = jax.vjp(lambda r, w: apply(r, w, group_sizes), rows, weights)
            return out, *pull(d_out)

        out, d_rows, d_weights = run(rows, weights, group_sizes, d_out)
    np.testing.assert_allclose(
        out, np.concatenate([e[0] for e in expected]), **TOLERANCES["float32"]
    )
    np.testing.assert_allclose(
        d_rows, np.concatenate([e[1] for e in expected]), **TOLERANCES["float32"]
    )
    np.testing.assert_allclose(d_weights, sum(e[2] for e in expected), **TOLERANCES["float32"])


def test_under_scan_and_checkpoint():
    """Gradients through scan and checkpoint equal those of the reference."""
    rows, weights, group_sizes, _ = _inputs(64, [50, 3, 0, 11])
    weights = jnp.stack([weights, weights[::-1]])  # two layers, [2 G 12 10]

    def loss(weights, implementation):
        @jax.checkpoint
        def layer(rows, weights):
            out = grouped_matmul(rows, weights, group_sizes, implementation=implementation)
            return jnp.pad(out, ((0, 0), (0, 2))), None

        return jnp.sum(jnp.square(jax.lax.scan(layer, rows, weights)[0]))

    actual, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(weights, name) for name in ("xla", "reference")
    )
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(actual / scale, expected / scale, **TOLERANCES["float32"])


@pytest.mark.parametrize(
    ("rows", "weights", "sizes", "message"),
    [
        ((4, 3), (2, 5, 6), (2,), r"width of rows \(3\) must equal .* weights \(5\)"),
        ((4, 3), (2, 3, 6), (3,), r"weights have 2 groups and group_sizes 3"),
        ((4, 3), (3, 6), (2,), r"takes rows \[R k\].* not rows \(4, 3\), weights \(3, 6\)"),
    ],
)
def test_bad_shapes_are_refused(rows, weights, sizes, message):
    with pytest.raises(ValueError, match=message):
        _unchecked(jnp.zeros(rows), jnp.zeros(weights), jnp.zeros(sizes, jnp.int32))


def test_bad_dtypes_are_refused():
    rows, weights, group_sizes, _ = _inputs(4, [2, 2])
    with pytest.raises(ValueError, match=r"rows \(float32\) and weights \(bfloat16\) must have"):
        _unchecked(rows, weights.astype(jnp.bfloat16), group_sizes)
    with pytest.raises(ValueError, match="group_sizes must be integers, not float32"):
        _unchecked(rows, weights, group_sizes.astype(jnp.float32))


@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_sizes_of_narrow_integers(implementation):
    """The sum of the sizes, 280, exceeds their dtype."""
    rows, weights, group_sizes, _ = _inputs(300, [120, 100, 60])
    run = jax.jit(functools.partial(grouped_matmul, implementation=implementation))
    actual, expected = (
        run(rows, weights, sizes) for sizes in (group_sizes.astype(jnp.int8), group_sizes)
    )
    np.testing.assert_array_equal(actual, expected)


def _unchecked(*args):
    """Call without type checks, as users do."""
    return inspect.unwrap(grouped_matmul)(*args)
