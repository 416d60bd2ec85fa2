# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares every implementation of grouped_swiglu with the reference, and it with dense SwiGLUs.

Cases of the shared layout are in `tests/pallas_kernels/grouped_matmul/test_grouped_matmul.py`.

To add an implementation: a name in IMPLEMENTATIONS.
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

from pallas_kernels import OPERATIONS, QuantizedArray, dequantize, grouped_swiglu, quantize
from pallas_kernels.backend import tpu_kernels_run
from pallas_kernels.grouped_matmul import layout
from pallas_kernels.grouped_swiglu import Additions, LowRankFactors
from tests.pallas_kernels.grouped_matmul.test_grouped_matmul import CASES, TOLERANCES

IMPLEMENTATIONS = ("xla",)  # and those for TPUs and GPUs, in files of their own
WIDTH, HIDDEN = 6, 5


def _inputs(num_rows, sizes, dtype="float32"):
    keys = jax.random.split(jax.random.key(num_rows), 4)
    rows = jax.random.normal(keys[0], (num_rows, WIDTH))
    gate_up = 0.5 * jax.random.normal(keys[1], (len(sizes), WIDTH, 2, HIDDEN))
    down = 0.5 * jax.random.normal(keys[2], (len(sizes), HIDDEN, WIDTH))
    d_out = jax.random.normal(keys[3], (num_rows, WIDTH))
    # Must not be read.
    rows = rows.at[sum(sizes) :].set(jnp.nan)
    d_out = d_out.at[sum(sizes) :].set(jnp.inf)
    arrays = (x.astype(dtype) for x in (rows, gate_up, down))
    return (*arrays, jnp.array(sizes, jnp.int32), d_out.astype(dtype))


def _value_and_gradients(*inputs, implementation):
    constants = (layout.BLOCKS, layout.MIN_HEADS, layout.SLACK)
    return _compiled(*inputs, implementation=implementation, constants=constants)


@functools.partial(
    jax.jit,
    static_argnames=("implementation", "constants"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def _compiled(rows, gate_up, down, group_sizes, d_out, *, implementation, constants):
    """Return a compiled program; the unread `constants` keep programs apart."""
    del constants
    function = functools.partial(
        grouped_swiglu, group_sizes=group_sizes, implementation=implementation
    )
    out, pull = jax.vjp(lambda *arrays: function(*arrays), rows, gate_up, down)
    return out, *pull(d_out)


def _assert_equal(actual, expected, tolerance=TOLERANCES["float32"]):
    names = ("out", "d_rows", "d_gate_up", "d_down")
    for name, x, y in zip(names, actual, expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, err_msg=name, **tolerance)


@pytest.fixture(params=[False, True], ids=["default", "small_blocks"])
def small_blocks(request, monkeypatch):
    """Shrink constants so that these shapes reach every branch."""
    if request.param:
        monkeypatch.setattr(layout, "BLOCKS", (8, 4))
        monkeypatch.setattr(layout, "MIN_HEADS", (4,))


def test_every_implementation_is_in_the_table():
    assert set(OPERATIONS["grouped_swiglu"].implementations) == {
        "reference",
        *IMPLEMENTATIONS,
        "pallas_tpu",
        "pallas_gpu",
    }


def test_oracle_against_dense_swiglus():
    """Each group alone, in plain jax.numpy, with gradients derived by JAX."""
    rows, gate_up, down, group_sizes, d_out = _inputs(24, [9, 0, 11, 4])
    actual = _value_and_gradients(
        rows, gate_up, down, group_sizes, d_out, implementation="reference"
    )

    def dense(rows, gate_up, down):
        parts = []
        for group, part in enumerate(np.split(np.arange(24), [9, 9, 20])):
            gate, up = (rows[part] @ gate_up[group, :, i] for i in (0, 1))
            parts.append((gate / (1.0 + jnp.exp(-gate)) * up) @ down[group])
        return jnp.concatenate(parts)

    out, pull = jax.vjp(dense, rows, gate_up, down)
    _assert_equal(actual, (out, *pull(d_out)))


@pytest.mark.rows(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parity(implementation, case, small_blocks):
    inputs = _inputs(*CASES[case])
    actual = _value_and_gradients(*inputs, implementation=implementation)
    expected = _value_and_gradients(*inputs, implementation="reference")
    _assert_equal(actual, expected)
    used = int(inputs[3].sum())
    for x in (*actual[:2], *expected[:2]):
        assert not np.any(x[used:]), "rows past the last group must be exactly 0"


def _factors(shape, rank, seed):
    """An addition to matrices [G k n], not small beside them."""
    keys = jax.random.split(jax.random.key(seed), 2)
    groups, width, outputs = shape
    down = jax.random.normal(keys[0], (groups, width, rank))
    up = 0.5 * jax.random.normal(keys[1], (groups, rank, outputs))
    return LowRankFactors(down, up, jnp.float32(0.7))


@pytest.mark.rows(6)
@pytest.mark.parametrize("where", ("both", "gate_up", "down"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_additions(implementation, case, where, small_blocks):
    """Low-rank additions equal the sums of the matrices, with the gradients of every array."""
    rows, gate_up, down, group_sizes, d_out = _inputs(*CASES[case])
    groups = len(group_sizes)
    additions = Additions(
        gate_up=_factors((groups, WIDTH, 2 * HIDDEN), 2, 1) if where != "down" else None,
        down=_factors((groups, HIDDEN, WIDTH), 3, 2) if where != "gate_up" else None,
    )
    factors = jax.random.normal(jax.random.key(3), rows.shape[:1])

    def values(implementation):
        def value(rows, gate_up, down, factors, additions):
            arrays = (rows, gate_up, down, group_sizes, factors)
            return grouped_swiglu(*arrays, additions=additions, implementation=implementation)

        out, pull = jax.vjp(value, rows, gate_up, down, factors, additions)
        return out, *pull(d_out)

    compiled = jax.jit(
        values,
        static_argnums=0,
        compiler_options={"xla_backend_optimization_level": 0},
    )
    actual, expected = (jax.tree.leaves(compiled(name)) for name in (implementation, "reference"))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, **TOLERANCES["float32"])
    assert not np.any(actual[0][int(group_sizes.sum()) :])


def test_additions_that_do_not_fit_are_refused():
    rows, gate_up, down, group_sizes, _ = _inputs(*CASES["skewed"])
    groups = len(group_sizes)
    factors = _factors((groups, HIDDEN, WIDTH), 2, 1)
    call = functools.partial(grouped_swiglu, rows, gate_up, down, group_sizes)
    with pytest.raises(ValueError, match="must be .* and"):
        call(additions=Additions(gate_up=factors))
    refused = pytest.raises(ValueError, match="takes no additions: use xla or reference")
    with tpu_kernels_run(), refused:
        call(additions=Additions(down=factors), implementation="pallas_tpu")
    quantised = quantize(down, "int8", axis=-2)
    with pytest.raises(ValueError, match="quantised and has an addition"):
        grouped_swiglu(rows, gate_up, quantised, group_sizes, additions=Additions(down=factors))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_factors_of_rows(implementation, dtype, small_blocks):
    """Those of outputs, whose gradient JAX derives; a factor of 0 has a gradient."""
    rows, gate_up, down, group_sizes, d_out = _inputs(*CASES["skewed"], dtype=dtype)
    used = int(group_sizes.sum())
    factors = jax.random.normal(jax.random.key(1), rows.shape[:1]).at[1].set(0.0)
    factors = factors.at[used:].set(jnp.nan)

    def inside(*arrays):
        *arrays, factors = arrays
        return grouped_swiglu(*arrays, group_sizes, factors, implementation=implementation)

    def outside(*arrays):
        *arrays, factors = arrays
        out = grouped_swiglu(*arrays, group_sizes, implementation="reference")
        return (out.astype(jnp.float32) * factors[:, None])[:used].astype(dtype)

    out, pull = jax.vjp(inside, rows, gate_up, down, factors)
    expected, pull_expected = jax.vjp(outside, rows, gate_up, down, factors)
    assert not np.any(np.asarray(out[used:], np.float32))
    for x, y in zip(
        (out[:used], *pull(d_out)), (expected, *pull_expected(d_out[:used])), strict=True
    ):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, **TOLERANCES[dtype])
    with pytest.raises(ValueError, match=r"row_factors has shape .* give one for each"):
        inspect.unwrap(grouped_swiglu)(rows, gate_up, down, group_sizes, factors[1:])


@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_halves_and_turned_matrices_change_nothing(implementation):
    rows, gate_up, down, group_sizes, _ = _inputs(*CASES["skewed"])
    run = functools.partial(grouped_swiglu, group_sizes=group_sizes, implementation=implementation)
    halves = (gate_up[:, :, 0], gate_up[:, :, 1])
    np.testing.assert_array_equal(
        run(rows, halves, down, down_is_turned=True), run(rows, gate_up, down)
    )
    with pytest.raises(ValueError, match="gate .* and up .* must have the same shape"):
        inspect.unwrap(grouped_swiglu)(rows, (halves[0], halves[1][:, 1:]), down, group_sizes)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parity_in_bfloat16(implementation):
    inputs = _inputs(*CASES["skewed"], dtype="bfloat16")
    actual = _value_and_gradients(*inputs, implementation=implementation)
    assert {x.dtype for x in actual} == {jnp.dtype(jnp.bfloat16)}
    expected = _value_and_gradients(*inputs, implementation="reference")
    _assert_equal(actual, expected, TOLERANCES["bfloat16"])


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("of_gate_up", "of_down"), [("channel", 4), (2, None), (None, "tensor"), ("tensor", "channel")]
)
@pytest.mark.parametrize("implementation", ("reference", *IMPLEMENTATIONS))
def test_quantised_matrices(implementation, of_gate_up, of_down):
    """Equal to dequantised matrices, without a gradient of them."""
    rows, gate_up, down, group_sizes, d_out = _inputs(*CASES["padding"])
    down = jnp.concatenate([down] * 4, axis=1)[:, :16]
    gate_up = jnp.concatenate([gate_up] * 4, axis=3)[..., :16]
    weights = [
        _quantised(gate_up, "int8", -3, of_gate_up),
        _quantised(down, "int4", -2, of_down),
    ]

    def function(rows, weights, name):
        return grouped_swiglu(rows, *weights, group_sizes, implementation=name)

    def value_and_gradient(weights, name):
        out, pull = jax.vjp(lambda rows: function(rows, weights, name), rows)
        return out, *pull(d_out)

    actual = jax.jit(value_and_gradient, static_argnums=1)(weights, implementation)
    numbers = [dequantize(w) if isinstance(w, QuantizedArray) else w for w in weights]
    expected = value_and_gradient(numbers, "reference")
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, **TOLERANCES["float32"])
    assert not np.any(actual[0][int(group_sizes.sum()) :])


def _quantised(x, dtype, axis, scales):
    if scales is None:
        return x
    if scales == "tensor":
        return jax.vmap(lambda one: quantize(one, dtype, axis=None))(x)
    return quantize(x, dtype, axis=axis, block_size=None if scales == "channel" else scales)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_any_sizes(sizes):
    """One compiled function serves all sizes."""
    rows, gate_up, down, _, d_out = _inputs(40, [40, 0, 0, 0, 0])
    group_sizes = jnp.array(np.diff(np.minimum(np.cumsum([0, *sizes]), 40)), jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCKS", (8, 4))
        patch.setattr(layout, "MIN_HEADS", (4,))
        actual, expected = (
            _value_and_gradients(rows, gate_up, down, group_sizes, d_out, implementation=name)
            for name in ("xla", "reference")
        )
    _assert_equal(actual, expected)


def test_no_rows():
    out, *gradients = _value_and_gradients(*_inputs(0, [0, 0]), implementation=None)
    assert out.shape == (0, WIDTH)
    assert not any(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize(
    ("implementation", "check_vma"),
    [("reference", False), *((name, True) for name in IMPLEMENTATIONS)],
)
def test_in_shard_map(implementation, check_vma):
    """With sharded rows and replicated weights, gradients of weights are summed."""
    parts = [_inputs(*CASES[name]) for name in ("balanced", "skewed", "padding", "all_empty")]
    weights = parts[0][1:3]
    expected = [
        _value_and_gradients(part[0], *weights, *part[3:], implementation="reference")
        for part in parts
    ]
    rows, group_sizes, d_out = (jnp.concatenate([part[i] for part in parts]) for i in (0, 3, 4))
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(AxisType.Auto,))
    apply = jax.shard_map(
        lambda r, u, d, g: grouped_swiglu(r, u, d, g, implementation=implementation),
        mesh=mesh,
        in_specs=(P("tokens"), P(), P(), P("tokens")),
        out_specs=P("tokens"),
        check_vma=check_vma,
    )

    @jax.jit
    def run(rows, gate_up, down, group_sizes, d_out):
        out, pull = jax.vjp(lambda *arrays: apply(*arrays, group_sizes), rows, gate_up, down)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        actual = run(rows, *weights, group_sizes, d_out)
    joined = [np.concatenate([part[i] for part in expected]) for i in (0, 1)]
    summed = [sum(np.asarray(part[i]) for part in expected) for i in (2, 3)]
    _assert_equal(actual, (*joined, *summed))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 3), (2, 5, 2, 6), (2, 6, 3), (2,)), r"with k the width of rows \(3\)"),
        (((4, 3), (2, 3, 2, 6), (2, 7, 3), (2,)), r"gate_up must be \[G k 2 n\]"),
        (((4, 3), (2, 3, 2, 6), (2, 6, 3), (3,)), r"matrices for 2 groups, and 3 group_sizes"),
        (((4, 3), (2, 3, 12), (2, 6, 3), (2,)), r"takes rows \[R k\], gate_up \[G k 2 n\]"),
    ],
)
def test_bad_shapes_are_refused(shapes, message):
    *arrays, sizes = shapes
    with pytest.raises(ValueError, match=message):
        _unchecked(*map(jnp.zeros, arrays), jnp.zeros(sizes, jnp.int32))


def test_bad_dtypes_are_refused():
    rows, gate_up, down, group_sizes, _ = _inputs(4, [2, 2])
    with pytest.raises(ValueError, match=r"rows \(float32\) and down \(bfloat16\) must have"):
        _unchecked(rows, gate_up, down.astype(jnp.bfloat16), group_sizes)
    with pytest.raises(ValueError, match=r"gate_up has scales along axis -2, .* axis -3"):
        _unchecked(rows, quantize(gate_up, "int8", axis=-2), down, group_sizes)
    with pytest.raises(ValueError, match="group_sizes must be integers, not float32"):
        _unchecked(rows, gate_up, down, group_sizes.astype(jnp.float32))


def test_sizes_of_narrow_integers():
    """The sum of the sizes, 280, exceeds their dtype."""
    rows, gate_up, down, group_sizes, d_out = _inputs(300, [120, 100, 60])
    actual, expected = (
        _value_and_gradients(rows, gate_up, down, sizes, d_out, implementation="xla")
        for sizes in (group_sizes.astype(jnp.int8), group_sizes)
    )
    _assert_equal(actual, expected)


def _unchecked(*args):
    """Call without type checks, as users do."""
    return inspect.unwrap(grouped_swiglu)(*args)
