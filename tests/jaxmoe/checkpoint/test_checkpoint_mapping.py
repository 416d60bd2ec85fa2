# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mapping rules: every merge against numpy, and every misfit reported."""

import numpy as np
import pytest

from jaxmoe.checkpoint import CheckpointError
from jaxmoe.checkpoint.mapping import (
    Average,
    Concatenate,
    ConcatenateParts,
    Drop,
    Rename,
    Replicated,
    Unpad,
    plan_mapping,
    read_rules,
)


def _build(rules, arrays):
    plan = plan_mapping(rules, arrays)
    return {target: merged.build(arrays.__getitem__, target) for target, merged in plan.items()}


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_rename_without_merge():
    arrays = {"model/layers/3/wq": _random(2, 2), "model/head": _random(3)}
    layer = Rename("model/layers/{i}/wq", "layers/{i}/attention/q")
    with pytest.raises(CheckpointError, match="model/layers/3/wq: matches Rename.*'model/layers"):
        _build([layer, Rename("model/{rest...}", "{rest...}")], arrays)
    built = _build([layer, Rename("model/{rest}", "{rest}")], arrays)
    assert set(built) == {"layers/3/attention/q", "head"}
    assert built["head"] is arrays["model/head"]


def test_pieces_are_ordered_by_their_numbers():
    whole = _random(4, 24)
    arrays = {f"rank{r}/w": piece for r, piece in enumerate(np.split(whole, 12, axis=1))}
    built = _build([Concatenate("rank{r}/w", "w", axis=1)], arrays)
    np.testing.assert_array_equal(built["w"], whole)


def test_parts_of_a_fused_matrix():
    """Each rank holds its half of q, then of k, then of v."""
    q, k, v = (_random(4, 6, seed=seed) for seed in range(3))
    arrays = {
        f"rank{r}/qkv": np.concatenate([np.split(x, 2, 1)[r] for x in (q, k, v)], axis=1)
        for r in range(2)
    }
    built = _build([ConcatenateParts("rank{r}/qkv", "qkv", axis=1, parts=3)], arrays)
    np.testing.assert_array_equal(built["qkv"], np.concatenate([q, k, v], axis=1))


def test_padding_is_removed():
    table = _random(10, 3)
    padded = np.concatenate([table, np.zeros((6, 3), np.float32)])
    arrays = dict(zip(("rank0/e", "rank1/e"), np.split(padded, 2), strict=True))
    built = _build([Unpad("rank{r}/e", "e", axis=0, size=10)], arrays)
    np.testing.assert_array_equal(built["e"], table)
    with pytest.raises(CheckpointError, match="axis 0 has 16, of which 20 cannot be kept: rank0/e"):
        _build([Unpad("rank{r}/e", "e", axis=0, size=20)], arrays)


def test_replicas_must_be_equal_and_averages_need_not():
    one, other = _random(3), _random(3, seed=1)
    arrays = {"rank0/n": one, "rank1/n": one.copy()}
    replicated = [Replicated("rank{r}/n", "n")]
    np.testing.assert_array_equal(_build(replicated, arrays)["n"], one)
    arrays["rank1/n"] = other
    with pytest.raises(
        CheckpointError, match=r"^n, by Replicated\(.*: the pieces are not equal: rank0"
    ):
        _build(replicated, arrays)
    mean = _build([Average("rank{r}/n", "n")], arrays)["n"]
    np.testing.assert_allclose(mean, (one + other) / 2, rtol=1e-6)


def test_all_misfits_are_listed_at_once():
    arrays = dict.fromkeys(("a/w", "a/x", "b/w", "c"), np.zeros(1))
    rules = [Rename("{part}/w", "w"), Average("a/{n}", "{n}"), Rename("d", "d")]
    with pytest.raises(CheckpointError) as error:
        _build(rules, arrays)
    assert str(error.value) == (
        "the mapping does not fit (3 places):\n"
        "  a/w: matches Rename(source='{part}/w', target='w') and Average(source='a/{n}',"
        " target='{n}')\n"
        "  c: matches no rule\n"
        "  Rename(source='d', target='d') matches nothing"
    )
    rest = [Rename("a/x", "x"), Drop("c")]
    assert set(_build([Rename("{p}/w", "{p}"), *rest], arrays)) == {"a", "b", "x"}
    with pytest.raises(CheckpointError, match=r"w: has 2 pieces \(a/w, b/w\), which Rename"):
        _build([Rename("{p}/w", "w"), *rest], arrays)


def test_target_with_a_placeholder_that_the_source_lacks_is_refused():
    with pytest.raises(ValueError, match=r"the source has no placeholder \{i\}"):
        Rename("a", "b/{i}")


def test_rules_are_read_from_a_python_file(tmp_path):
    file = tmp_path / "names.py"
    head = "from jaxmoe.checkpoint.mapping import Drop, Rename\n"
    file.write_text(f"{head}RULES = [Rename(f'{{x}}', 'y') for x in 'ab'] + [Drop('c')]\n")
    assert read_rules(str(file), "mapping") == (Rename("a", "y"), Rename("b", "y"), Drop("c"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory): give a Python file with RULES ="),
        ("a/{i} -> b", "cannot be run ("),
        ("RULES = (Rename('a', 'b'),)", "cannot be run (name 'Rename' is not defined)"),
        ("rules = ()", "defines no RULES"),
        ("RULES = ('a -> b',)", "defines no RULES"),
    ],
)
def test_files_without_rules_are_refused(tmp_path, text, message):
    file = tmp_path / "names.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="^mapping=") as error:
        read_rules(str(file), "mapping")
    assert message in str(error.value)
