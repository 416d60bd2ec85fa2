# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tolerances by dtype and kind of computation; tests state no number of their own.

    elementwise   a few operations per value, no long sum
    matmul        one sum of up to some hundred products of order 1
    attention     two matrix products with a softmax between them
    end_to_end    loss or gradients of a whole small model, sums taken in another order
    other_length  the same over rows of another length (seen: 4e-5 on jax 0.12, in a gradient behind
                  a norm over 6 features)

A value passes where |actual - desired| <= atol * scale + rtol * |desired|, with `scale` the largest
|desired| of its array, at least 1: what cancels to nearly 0 keeps the rounding of its terms.
"""

from typing import Any

import jax
import numpy as np

TOLERANCES = {
    ("float32", "elementwise"): {"rtol": 2e-6, "atol": 1e-6},
    ("float32", "matmul"): {"rtol": 1e-5, "atol": 1e-5},
    ("float32", "attention"): {"rtol": 1e-5, "atol": 1e-5},
    ("float32", "end_to_end"): {"rtol": 1e-4, "atol": 1e-5},
    ("float32", "other_length"): {"rtol": 1e-4, "atol": 5e-5},
    ("bfloat16", "elementwise"): {"rtol": 1e-2, "atol": 1e-2},
    ("bfloat16", "matmul"): {"rtol": 2e-2, "atol": 2e-2},
    ("bfloat16", "attention"): {"rtol": 2e-2, "atol": 2e-2},
    ("bfloat16", "end_to_end"): {"rtol": 5e-2, "atol": 5e-2},
}


def assert_close(actual: Any, desired: Any, kind: str, dtype: str = "float32") -> None:
    """Two trees have the same structure, and close values.

    Args:
        actual: arrays.
        desired: arrays.
        kind: a row of the table.
        dtype: of the computation, which may be narrower than that of its result.
    """
    __tracebackhide__ = True
    rtol, atol = TOLERANCES[dtype, kind].values()
    ours, structure = jax.tree.flatten_with_path(actual)
    theirs, wanted = jax.tree.flatten(desired)
    assert structure == wanted, f"{structure} is not {wanted}"
    for (path, value), other in zip(ours, theirs, strict=True):
        value, other = (np.asarray(array, dtype=np.float64) for array in (value, other))
        scale = max(1.0, np.abs(other).max(initial=0.0, where=np.isfinite(other)))
        where = jax.tree_util.keystr(path)
        assert value.shape == other.shape, f"{where}: {value.shape} is not {other.shape}"
        np.testing.assert_allclose(value, other, rtol=rtol, atol=atol * scale, err_msg=where)
