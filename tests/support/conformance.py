# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines conformance cases of products as data, and compares implementations with numpy.

    PAIRS, GROUPED_PAIRS, OUTER_PAIRS    pairs of factors, by name
    SIZES                                rows of each group: empty, one hot, off by one of tiles
    POISONS                              values of rows that must not be read

    check_product(multiply, pair)        `multiply` has the signature of the public function:
    check_exact_product(multiply, pair)      functools.partial(quantized_matmul, implementation=..)
    check_grouped(multiply, pair)        every group pattern and poison; value and both gradients
    check_exact_grouped(multiply, pair)
    check_outer(contract, pair)          the same for grouped_outer
    check_exact_outer(contract, pair)

Each check traces its function once per pair: group sizes and poisons are values. Results are
compared with float64 sums over the values that the factors represent (integers: int64, exact), by
the largest error relative to the largest value. Where a size does not suit a kernel, give
`dims=Dims(...)`; where all patterns take too long, `sizes={"skewed": SIZES["skewed"]}`.

To add a pair, a pattern or a poison: a line in its table in `tests/support/conformance.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QuantizedArray, quantize
from tests.support.tolerances import TOLERANCES

INTEGERS = ("int8", "int4")


class Factor(NamedTuple):
    """Storage of one factor of a product."""

    dtype: str
    """Floating dtype, or a dtype name of `quantize`."""
    scales: str | int | None = None
    """Kind of scales.

    None for floating values, "tensor" for one scale (per matrix), "channel" for one per row or
    column, or the size of a block.
    """

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS


class Dims(NamedTuple):
    """Sizes of a product: R rows, k summed over, n columns, G groups."""

    R: int = 40
    k: int = 256
    n: int = 72
    G: int = 4


PAIRS: dict[str, tuple[Factor, Factor]] = {
    "float32": (Factor("float32"), Factor("float32")),
    "w8a8_tensor": (Factor("int8", "tensor"), Factor("int8", "tensor")),
    "w8a8_channel": (Factor("int8", "channel"), Factor("int8", "channel")),
    "w8a8_block": (Factor("int8", 128), Factor("int8", 128)),
    "w8a8_mixed": (Factor("int8", "tensor"), Factor("int8", 64)),
    "w4a8_channel": (Factor("int8", "channel"), Factor("int4", "channel")),
    "w4a8_block": (Factor("int8", 128), Factor("int4", 64)),
    "w4a4_block": (Factor("int4", 128), Factor("int4", 128)),
    "w8a16_channel": (Factor("bfloat16"), Factor("int8", "channel")),
    "w8a16_tensor": (Factor("bfloat16"), Factor("int8", "tensor")),
    "w4a16_block": (Factor("bfloat16"), Factor("int4", 128)),
    "w4a32_block": (Factor("float32"), Factor("int4", 64)),
    "e4m3_channel": (Factor("float8_e4m3fn", "channel"), Factor("float8_e4m3fn", "channel")),
    "e5m2_e4m3": (Factor("float8_e5m2", "tensor"), Factor("float8_e4m3fn", "tensor")),
    "e4m3_block": (Factor("float8_e4m3fn", 128), Factor("float8_e4m3fn", 128)),
    "mxfp8": (Factor("mxfp8", 32), Factor("mxfp8", 32)),
    "mxfp8_a16": (Factor("bfloat16"), Factor("mxfp8", 32)),
}
"""Pairs of quantized_matmul: x [m k], w [k n]."""

_GROUPED = ("w8a8_tensor", "w8a8_channel", "w8a8_block", "w4a8_channel", "w4a8_block")
_GROUPED += ("w8a16_channel", "w8a16_tensor", "w4a16_block", "e4m3_channel", "e5m2_e4m3", "mxfp8")
GROUPED_PAIRS: dict[str, tuple[Factor, Factor]] = {
    "float32": (Factor("float32"), Factor("float32")),
    "bfloat16": (Factor("bfloat16"), Factor("bfloat16")),
    **{name: PAIRS[name] for name in _GROUPED},
}
"""Pairs of grouped_matmul: rows [R k], weights [G k n]."""

OUTER_PAIRS: dict[str, tuple[Factor, Factor]] = {
    name: GROUPED_PAIRS[name] for name in ("float32", "bfloat16", "w8a8_tensor", "e5m2_e4m3")
}
"""Pairs of grouped_outer: rows [R k], others [R n], quantised by one scale."""

DIMS = Dims()
GROUPED_DIMS = Dims(R=600, k=256, n=40, G=4)

SIZES: dict[str, tuple[int, ...]] = {
    "empty": (0, 0, 0, 0),
    "one_row": (0, 0, 1, 0),
    "first_hot": (600, 0, 0, 0),
    "last_hot": (0, 0, 0, 600),
    "middle_hot": (0, 517, 0, 0),
    "full": (150, 150, 150, 150),
    "skewed": (11, 0, 480, 3),
    **{
        f"off_by_one_of_{tile}": (tile - 1, tile + 1, tile, 1 if tile < 256 else 0)
        for tile in (8, 64, 128)
    },
    "off_by_one_of_256": (255, 257, 1, 0),
    "above_256": (257, 0, 256, 87),
    "above_the_rows": (3, 500, 200, 7),
}
"""Rows of the four groups of `GROUPED_DIMS`, which has 600 rows."""

POISONS: dict[str, float] = {"nan": np.nan, "inf": np.inf, "large": 3e38}
"""Values of rows past the last group, and of their gradients."""


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def operand(key: jax.Array, shape: tuple[int, ...], factor: Factor, axis: int) -> Any:
    """Return normal values, stored as `factor`, with scales that vary by channel."""
    spread = np.exp2(np.arange(shape[-1]) % 3).astype(np.float32)
    x = jax.random.normal(key, shape) * spread.reshape(*(1,) * (len(shape) - 1), -1)
    if factor.scales is None:
        return x.astype(factor.dtype)
    if factor.scales == "tensor":
        one = functools.partial(quantize, dtype=factor.dtype, axis=None)
        return jax.vmap(one)(x) if x.ndim == 3 else one(x)
    block = None if factor.scales == "channel" else factor.scales
    return quantize(x, factor.dtype, axis=axis, block_size=block)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def exact_operand(key: jax.Array, shape: tuple[int, ...], factor: Factor, axis: int) -> Any:
    """Return random integers of the whole range, with scales that are powers of two.

    Sums of products are then exact in float32, in any order of scaling.
    """
    if not factor.is_integer:
        raise ValueError(f"{factor} is of no integers.")
    like = operand(key, shape, factor, axis)
    largest = 127 if factor.dtype == "int8" else 7
    keys = jax.random.split(key)
    values = jax.random.randint(keys[0], shape, -largest, largest + 1).astype(like.values.dtype)
    scales = jnp.exp2(jax.random.randint(keys[1], like.scales.shape, -1, 2).astype(jnp.float32))
    return QuantizedArray(values=values, scales=scales, axis=like.axis)


def numbers(x: Any) -> np.ndarray:
    """Return the values that a factor represents, in float64."""
    if not isinstance(x, QuantizedArray):
        return np.asarray(x.astype(jnp.float32)).astype(np.float64)
    values, scales = (np.asarray(a.astype(jnp.float32)).astype(np.float64) for a in _leaves(x))
    for axis, (size, blocks) in enumerate(zip(values.shape, scales.shape, strict=True)):
        scales = np.repeat(scales, size // blocks, axis)
    return values * scales


def assert_near(actual: Any, expected: np.ndarray, bound: float, what: str) -> None:
    """Assert that errors are at most `bound` of the largest value, and nonfinite values equal."""
    __tracebackhide__ = True
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), is_nan, err_msg=f"{what}: where NaN is")
    peak = np.abs(expected).max(initial=0.0, where=~is_nan)
    error = np.abs(actual - expected).max(initial=0.0, where=~is_nan)
    assert error <= bound * peak, f"{what}: error {error:.3g} of {peak:.3g}, more than {bound:.2g}"


def bound_of(factors: tuple[Factor, Factor]) -> float:
    """Return the error that rounding allows: float32 sums of exact products.

    A factor in bfloat16 allows rounding of the other one, and of gradients, to bfloat16.
    """
    is_narrow = any(factor.dtype == "bfloat16" for factor in factors)
    return TOLERANCES["bfloat16" if is_narrow else "float32", "matmul"]["rtol"]


def check_product(
    multiply: Callable[..., Any], pair: tuple[Factor, Factor], dims: Dims = DIMS
) -> None:
    """Check quantized_matmul: value, gradients of floating factors, and one NaN scale.

    Args:
        multiply: (x, w, *, out_dtype) -> [m n].
        pair: Value of `PAIRS`.
        dims: Sizes of the product.
    """
    __tracebackhide__ = True
    keys = jax.random.split(jax.random.key(dims.k), 3)
    x = operand(keys[0], (dims.R, dims.k), pair[0], -1)
    w = operand(keys[1], (dims.k, dims.n), pair[1], -2)
    d_out = jax.random.normal(keys[2], (dims.R, dims.n))
    run = _with_gradients(multiply)
    bound = bound_of(pair)
    out, d_x, d_w = run(x, w, d_out)
    assert_near(out, numbers(x) @ numbers(w), bound, "value")
    if d_x is not None:
        assert_near(d_x, numbers(d_out) @ numbers(w).T, bound, "gradient of x")
    if d_w is not None:
        assert_near(d_w, numbers(x).T @ numbers(d_out), bound, "gradient of w")
    poisoned = _poison_last_column(w)
    out, *_ = run(x, poisoned, d_out)
    assert_near(out, numbers(x) @ numbers(poisoned), bound, "NaN scale")


def check_exact_product(
    multiply: Callable[..., Any], pair: tuple[Factor, Factor], dims: Dims = DIMS
) -> None:
    """Check that quantized_matmul of integers equals numpy's int64."""
    __tracebackhide__ = True
    keys = jax.random.split(jax.random.key(dims.n))
    x = exact_operand(keys[0], (dims.R, dims.k), pair[0], -1)
    w = exact_operand(keys[1], (dims.k, dims.n), pair[1], -2)
    out = jax.jit(functools.partial(multiply, out_dtype=jnp.float32))(x, w)
    np.testing.assert_array_equal(out, _in_quarters(x, w, lambda a, b: a @ b))


def check_grouped(
    multiply: Callable[..., Any],
    pair: tuple[Factor, Factor],
    dims: Dims = GROUPED_DIMS,
    sizes: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """Check grouped_matmul in every pattern of groups with poisoned rows: value and gradients.

    Args:
        multiply: (rows, weights, group_sizes, *, out_dtype) -> [R n].
        pair: Value of `GROUPED_PAIRS`.
        dims: Sizes of the product.
        sizes: Rows of each group by name; None for all of `SIZES`.
    """
    __tracebackhide__ = True
    keys = jax.random.split(jax.random.key(dims.k), 3)
    rows = operand(keys[0], (dims.R, dims.k), pair[0], -1)
    weights = operand(keys[1], (dims.G, dims.k, dims.n), pair[1], -2)
    d_out = jax.random.normal(keys[2], (dims.R, dims.n))
    run = _with_gradients(multiply)
    x, w, d = numbers(rows), numbers(weights), numbers(d_out)
    for what, group_sizes, poison in _patterns(sizes):
        used = min(sum(group_sizes), dims.R)
        ours, d_ours = _poison_rows(rows, used, poison), _poison_rows(d_out, used, poison)
        out, d_rows, d_weights = run(ours, weights, d_ours, jnp.array(group_sizes, jnp.int32))
        places = _places(group_sizes, dims.R)
        value = _joined(dims.R, dims.n, [(at, x[at] @ w[g]) for g, at in places])
        assert_near(out, value, bound_of(pair), f"{what}: value")
        assert not np.any(np.asarray(out)[used:]), f"{what}: rows past the last group are not 0"
        if d_rows is not None:
            turned = _joined(dims.R, dims.k, [(at, d[at] @ w[g].T) for g, at in places])
            assert_near(d_rows, turned, bound_of(pair), f"{what}: gradient of rows")
            past = np.asarray(d_rows)[used:]
            assert not np.any(past), f"{what}: gradients past the last group are not 0"
        if d_weights is not None:
            outer = np.stack([x[at].T @ d[at] for _, at in places])
            assert_near(d_weights, outer, bound_of(pair), f"{what}: gradient of weights")


def check_exact_grouped(
    multiply: Callable[..., Any],
    pair: tuple[Factor, Factor],
    dims: Dims = GROUPED_DIMS,
    sizes: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """Check that grouped_matmul of integers equals numpy's int64 in every pattern of groups."""
    __tracebackhide__ = True
    keys = jax.random.split(jax.random.key(dims.n))
    rows = exact_operand(keys[0], (dims.R, dims.k), pair[0], -1)
    weights = exact_operand(keys[1], (dims.G, dims.k, dims.n), pair[1], -2)
    run = jax.jit(functools.partial(multiply, out_dtype=jnp.float32))
    for what, group_sizes, poison in _patterns(sizes):
        ours = _poison_rows(rows, sum(group_sizes), poison)
        out = run(ours, weights, jnp.array(group_sizes, jnp.int32))
        places = _places(group_sizes, dims.R)

        def product(a, b, places=places):
            return _joined(dims.R, dims.n, [(at, a[at] @ b[g]) for g, at in places])

        expected = _in_quarters(rows, weights, product)
        np.testing.assert_array_equal(out, expected, err_msg=what)


def check_outer(
    contract: Callable[..., Any],
    pair: tuple[Factor, Factor],
    dims: Dims = GROUPED_DIMS,
    sizes: dict[str, tuple[int, ...]] | None = None,
    make: Callable[..., Any] = operand,
) -> None:
    """Check grouped_outer in every pattern of groups, with poisoned rows past them.

    Args:
        contract: (rows, others, group_sizes, *, out_dtype) -> [G k n].
        pair: Value of `OUTER_PAIRS`.
        dims: Sizes of the product.
        sizes: Rows of each group by name; None for all of `SIZES`.
        make: Function that makes operands.
    """
    __tracebackhide__ = True
    keys = jax.random.split(jax.random.key(dims.R))
    rows = make(keys[0], (dims.R, dims.k), pair[0], -1)
    others = make(keys[1], (dims.R, dims.n), pair[1], -1)
    run = jax.jit(functools.partial(contract, out_dtype=jnp.float32))
    x, y = numbers(rows), numbers(others)
    for what, group_sizes, poison in _patterns(sizes):
        used = min(sum(group_sizes), dims.R)
        ours, theirs = _poison_rows(rows, used, poison), _poison_rows(others, used, poison)
        out = run(ours, theirs, jnp.array(group_sizes, jnp.int32))
        expected = np.stack([x[at].T @ y[at] for _, at in _places(group_sizes, dims.R)])
        bound = 0.0 if make is exact_operand else bound_of(pair)
        assert_near(out, expected, bound, what)


def check_exact_outer(
    contract: Callable[..., Any],
    pair: tuple[Factor, Factor],
    dims: Dims = GROUPED_DIMS,
    sizes: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """Check grouped_outer of integers: sums below 2^24 are exact in every dtype."""
    __tracebackhide__ = True
    check_outer(contract, pair, dims, sizes, make=exact_operand)


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return (x, w, d_out, *others) -> value in float32 and gradients of floating factors."""

    @jax.jit
    def run(x, w, d_out, *others):
        floating = [i for i, a in enumerate((x, w)) if not isinstance(a, QuantizedArray)]

        def apply(*arrays):
            factors = [x, w]
            for i, array in zip(floating, arrays, strict=True):
                factors[i] = array
            return function(*factors, *others, out_dtype=jnp.float32)

        out, pull = jax.vjp(apply, *((x, w)[i] for i in floating))
        gradients = dict(zip(floating, pull(d_out), strict=True)) if floating else {}
        return out, gradients.get(0), gradients.get(1)

    return run


def _leaves(x: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    return x.values, x.scales


def _patterns(sizes: dict[str, tuple[int, ...]] | None):
    for name, group_sizes in (SIZES if sizes is None else sizes).items():
        for poison, value in POISONS.items():
            yield f"{name}, {poison}", group_sizes, value


def _places(group_sizes: tuple[int, ...], num_rows: int) -> list[tuple[int, slice]]:
    ends = [0, *np.minimum(np.cumsum(group_sizes), num_rows)]
    return [(g, slice(ends[g], ends[g + 1])) for g in range(len(group_sizes))]


def _joined(num_rows: int, width: int, parts: list[tuple[slice, np.ndarray]]) -> np.ndarray:
    out = np.zeros((num_rows, width))
    for at, part in parts:
        out[at] = part
    return out


def _poison_rows(x: Any, used: int, poison: float) -> Any:
    """Poison the rows past `used`, in scales too where rows have their own.

    Integers, which have no NaN or infinity, hold their largest value.
    """
    if not isinstance(x, QuantizedArray):
        return _with_rows(x, used, poison)
    largest = 7 if x.values.dtype == jnp.int4 else 127
    is_float = jnp.issubdtype(x.values.dtype, jnp.floating)
    values = _with_rows(x.values, used, np.nan if is_float else largest)
    scales = x.scales if x.scales.shape[0] == 1 else _with_rows(x.scales, used, poison)
    return QuantizedArray(values=values, scales=scales, axis=x.axis)


@jax.jit
def _with_rows(x: jax.Array, used: int, value: float) -> jax.Array:
    is_past = (jnp.arange(x.shape[0]) >= used)[:, None]
    return jnp.where(is_past, jnp.asarray(value, jnp.float32).astype(x.dtype), x)


def _poison_last_column(w: Any) -> Any:
    """Put a NaN in the last column's values or scales (in all where there is one scale)."""
    if not isinstance(w, QuantizedArray):
        return w.at[0, -1].set(jnp.nan)
    scales = w.scales.at[0, -1].set(jnp.array(jnp.nan, w.scales.dtype))
    return QuantizedArray(values=w.values, scales=scales, axis=w.axis)


def _in_quarters(x: QuantizedArray, w: QuantizedArray, product: Callable[..., Any]) -> np.ndarray:
    """Return the product in int64: scales are 1/2, 1 or 2, so twice the values are whole."""
    doubled = [np.rint(2.0 * numbers(a)).astype(np.int64) for a in (x, w)]
    assert all(np.array_equal(d, 2.0 * numbers(a)) for d, a in zip(doubled, (x, w), strict=True))
    return np.asarray(product(*doubled), np.float64) / 4.0
