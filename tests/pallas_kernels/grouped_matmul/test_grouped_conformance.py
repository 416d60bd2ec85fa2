# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares grouped_matmul and grouped_outer with numpy for every pair of factors and group pattern.

The comparison is in float64 and, for integers, int64, with NaN and infinity past the end. A few
rows always run, all of them with the slow tests. Faulty kernels must fail.

To add an implementation: a name in IMPLEMENTATIONS. To add a pair, a pattern or a poison:
`tests/support/conformance.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import QuantizedArray, grouped_matmul, grouped_outer
from pallas_kernels.grouped_matmul import api
from tests.support import conformance
from tests.support.conformance import GROUPED_PAIRS, OUTER_PAIRS, SIZES

IMPLEMENTATIONS = ("reference", "xla")
ALWAYS = ("w4a16_block",)
FEW = {name: SIZES[name] for name in ("off_by_one_of_64", "above_the_rows")}


def _cases(pairs, always=ALWAYS):
    """Return pairs, implementations and whether all patterns run: the fast ones, then all."""
    fast = [(pair, "xla", False) for pair in always]
    every = [(pair, name, True) for pair in pairs for name in IMPLEMENTATIONS]
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in every)]


def _integers(pairs):
    return [name for name, pair in pairs.items() if all(factor.is_integer for factor in pair)]


def _matmul(implementation):
    return functools.partial(grouped_matmul, implementation=implementation)


def _outer(implementation):
    return functools.partial(grouped_outer, implementation=implementation)


@pytest.mark.parametrize(("pair", "implementation", "is_whole"), _cases(GROUPED_PAIRS))
def test_grouped_matmul(pair, implementation, is_whole):
    sizes = SIZES if is_whole else FEW
    conformance.check_grouped(_matmul(implementation), GROUPED_PAIRS[pair], sizes=sizes)


@pytest.mark.parametrize(
    ("pair", "implementation", "is_whole"), _cases(_integers(GROUPED_PAIRS), ("w8a8_block",))
)
def test_grouped_matmul_of_integers_is_exact(pair, implementation, is_whole):
    sizes = SIZES if is_whole else FEW
    conformance.check_exact_grouped(_matmul(implementation), GROUPED_PAIRS[pair], sizes=sizes)


@pytest.mark.parametrize(("pair", "implementation", "is_whole"), _cases(OUTER_PAIRS, ()))
def test_grouped_outer(pair, implementation, is_whole):
    sizes = SIZES if is_whole else FEW
    conformance.check_outer(_outer(implementation), OUTER_PAIRS[pair], sizes=sizes)


@pytest.mark.parametrize(
    ("pair", "implementation", "is_whole"), _cases(("w8a8_tensor",), ("w8a8_tensor",))
)
def test_grouped_outer_of_integers_is_exact(pair, implementation, is_whole):
    sizes = SIZES if is_whole else FEW
    conformance.check_exact_outer(_outer(implementation), OUTER_PAIRS[pair], sizes=sizes)


def _with_first_scale(rows, weights, sizes, *, out_dtype):
    """Fault: use the scales of a matrix's first block for all blocks."""
    scales = jnp.broadcast_to(weights.scales[:, :1], weights.scales.shape)
    weights = dataclasses.replace(weights, scales=scales)
    return grouped_matmul(rows, weights, sizes, out_dtype=out_dtype)


def _one_row_late(rows, weights, sizes, *, out_dtype):
    """Fault: start at a multiple of 64 where groups begin one row before it."""
    starts = jnp.cumsum(sizes) - sizes
    late = jnp.where((starts % 64 == 63) & (sizes > 0), 1, 0)
    sizes = sizes - late + jnp.roll(late, -1)
    return grouped_matmul(rows, weights, sizes, out_dtype=out_dtype)


def _past_the_end(rows, weights, sizes, *, out_dtype):
    """Fault: count rows past the last group to the last one."""
    sizes = sizes.at[-1].add(rows.shape[0] - jnp.sum(sizes))
    return grouped_matmul(rows, weights, sizes, out_dtype=out_dtype)


@jax.custom_vjp
def _without_gradient(x):
    return x


_without_gradient.defvjp(lambda x: (x, None), lambda _, d: (jnp.zeros_like(d),))


def _constant_rows(rows, weights, sizes, *, out_dtype):
    """Fault: drop the gradient of the rows."""
    return grouped_matmul(_without_gradient(rows), weights, sizes, out_dtype=out_dtype)


@pytest.mark.parametrize(
    ("wrong", "pair", "pattern", "message"),
    [
        (_with_first_scale, "w8a8_block", "skewed", "skewed, nan: value"),
        pytest.param(
            _past_the_end, "w8a8_tensor", "one_row", "one_row, nan: ", marks=pytest.mark.slow
        ),
        pytest.param(
            _one_row_late,
            "w8a8_channel",
            "off_by_one_of_64",
            "off_by_one_of_64, nan: value",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _constant_rows,
            "w8a16_channel",
            "skewed",
            "skewed, nan: gradient of rows",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_kernel_is_caught(wrong, pair, pattern, message):
    with pytest.raises(AssertionError, match=message):
        sizes = {pattern: SIZES[pattern]}
        conformance.check_grouped(wrong, GROUPED_PAIRS[pair], sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_that_int32_cannot_hold(implementation, monkeypatch):
    """With a limit of 100 rows, sums are taken in six parts, which cut groups in two."""
    monkeypatch.setattr(api, "largest_sum", lambda rows, others: 100)
    sizes = {name: SIZES[name] for name in ("skewed", "off_by_one_of_64")}
    conformance.check_exact_outer(_outer(implementation), OUTER_PAIRS["w8a8_tensor"], sizes=sizes)


@pytest.mark.slow
def test_sums_of_one_too_few_are_caught():
    """Leaving out the last row of every group fails."""

    def wrong(rows, others, sizes, *, out_dtype):
        ends = jnp.cumsum(sizes)
        is_last = jnp.any(jnp.arange(rows.shape[0])[:, None] == ends[None] - 1, axis=1)
        values = jnp.where(is_last[:, None], jnp.zeros_like(rows.values), rows.values)
        rows = QuantizedArray(values=values, scales=rows.scales, axis=None)
        return grouped_outer(rows, others, sizes, out_dtype=out_dtype)

    with pytest.raises(AssertionError, match="skewed, nan"):
        sizes = {"skewed": SIZES["skewed"]}
        conformance.check_exact_outer(wrong, OUTER_PAIRS["w8a8_tensor"], sizes=sizes)
