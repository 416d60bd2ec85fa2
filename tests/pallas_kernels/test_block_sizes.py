# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The table of block sizes: which entry is used for which shape, and that a rule is always left."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import block_sizes
from pallas_kernels.block_sizes import BlockSizes, bucket, choose, trial

DEFAULT = {"m": 8, "n": 128}
TABLE = {
    "product": {
        "TPU v5": {
            "int8 x int4, m=32 n=1024": "m=32 n=512",
            "int8 x int4, m=4096 n=1024": "m=256 n=1024",
            "int8 x int8, m=32 n=1024": "m=64 n=64",
        }
    }
}


def _choose(m, n, fits=lambda sizes: True, dtypes="int8 x int4", kind="TPU v5"):
    device = AbstractDevice(kind, None, "tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return choose("product", dtypes, {"m": m, "n": n}, DEFAULT, fits, table=TABLE)


@pytest.mark.parametrize(
    ("m", "n", "sizes"),
    [(17, 700, {"m": 32, "n": 512}), (100, 1024, {"m": 32, "n": 512}), (1, 1024, DEFAULT)]
    + [
        (362, 1024, DEFAULT),
        (8192, 2048, {"m": 256, "n": 1024}),
        (1100, 1024, {"m": 256, "n": 1024}),
    ],
)
def test_the_nearest_bucket(m, n, sizes):
    assert _choose(m, n).sizes == sizes


def test_the_reason_in_words():
    assert _choose(17, 700).reason == "measured on TPU v5 for int8 x int4, m=32 n=1024"
    assert _choose(1, 1024).reason == "by rule: none of those measured near this shape"
    other = _choose(17, 700, kind="TPU v4")
    assert other == BlockSizes(DEFAULT, "by rule: none measured on TPU v4")


def test_what_does_not_fit_is_passed_over():
    def fits(sizes):
        return sizes["m"] != 32

    assert _choose(32, 1024).sizes == {"m": 32, "n": 512}
    assert _choose(32, 1024, fits).sizes == DEFAULT
    assert _choose(32, 1024, dtypes="int8 x int8").sizes == {"m": 64, "n": 64}


def test_sizes_on_trial():
    """They stand before the table, add to the rule, and do not slip past what fits."""
    with trial("product", {"n": 256}) as asked, trial("other", {"n": 1}) as nothing:
        assert _choose(32, 1024) == BlockSizes({"m": 8, "n": 256}, "on trial")
        assert not nothing
        assert [(one.bucket, one.default) for one in asked] == [
            ("int8 x int4, m=32 n=1024", DEFAULT)
        ]
        message = r"product: blocks n=256 do not fit int8 x int4, m=32 n=1024: .* near m=8 n=128"
        with pytest.raises(ValueError, match=message):
            _choose(32, 1024, lambda sizes: sizes["n"] < 256)
    with trial("product", {"k": 256}), pytest.raises(ValueError, match="do not fit"):
        _choose(32, 1024)
    assert _choose(32, 1024).reason.startswith("measured")


@given(m=st.integers(0, 10**6), n=st.integers(0, 10**6))
def test_a_bucket_is_found_by_every_shape_in_it(m, n):
    shape = {"m": m, "n": n}
    table = {"product": {"cpu": {bucket("float32", shape): "m=1 n=2"}}}
    found = choose("product", "float32", shape, DEFAULT, table=table)
    assert found.sizes == ({"m": 1, "n": 2}), found.reason


def test_the_table_in_the_tree():
    """Every bucket reads back, and names sizes that are positive."""
    for kinds in block_sizes.BLOCK_SIZES.values():
        for buckets in kinds.values():
            for name, sizes in buckets.items():
                dtypes, lengths = name.split(", ")
                assert bucket(dtypes, dict(map(_pair, lengths.split()))) == name
                assert all(size > 0 for _, size in map(_pair, sizes.split()))


def _pair(text):
    key, value = text.split("=")
    return key, int(value)
