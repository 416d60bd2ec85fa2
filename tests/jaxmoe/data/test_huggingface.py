# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face data sets, with a fake of the `datasets` package."""

import sys
import types

import numpy as np
import pytest

from jaxmoe.data import DataError, HuggingFaceConfig


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class _FakeRows(list):
    """The part of `datasets.Dataset` that is used."""

    column_names = ("text", "id")
    _fingerprint = "0123"

    def select_columns(self, names):
        return [{name: row[name] for name in names} for row in self]


def _install(monkeypatch, **functions):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(**functions))


def test_huggingface_data_set_is_read(tmp_path, monkeypatch):
    rows = _FakeRows(
        {"text": text, "id": i} for i, text in enumerate([f"text {i} " * 9 for i in range(30)])
    )
    calls = []

    def load_dataset(*names, **options):
        calls.append((names, options))
        return rows

    _install(monkeypatch, load_dataset=load_dataset, load_from_disk=lambda path: {"train": rows})
    source = HuggingFaceConfig(dataset="org/stories").build()
    assert calls == [(("org/stories", None), {"split": "train", "revision": None})]
    assert source.fingerprint()["train"]["sha256"] == "0123"
    assert source.fingerprint()["kind"] == "huggingface"
    (tmp_path / "saved").mkdir()
    saved = HuggingFaceConfig(dataset=str(tmp_path / "saved")).build()
    np.testing.assert_array_equal(saved.text("train"), source.text("train"))
    with pytest.raises(DataError, match="has no split 'dev'; it has 'train': name one"):
        HuggingFaceConfig(dataset=str(tmp_path / "saved"), dataset_split="dev").build()
    with pytest.raises(DataError, match="has no column 'body'; it has 'text', 'id': name"):
        HuggingFaceConfig(dataset="org/stories", text_field="body").build()
    rows.append({"text": None, "id": 30})
    with pytest.raises(DataError, match="org/stories row 30: field 'text' must hold a text"):
        HuggingFaceConfig(dataset="org/stories", cache=str(tmp_path / "new")).build()


def test_unreadable_data_set_is_refused(monkeypatch):
    def load_dataset(*names, **options):
        raise FileNotFoundError("Couldn't find the dataset")

    _install(monkeypatch, load_dataset=load_dataset)
    with pytest.raises(DataError, match="data.dataset=org/x cannot be loaded: Couldn't find"):
        HuggingFaceConfig(dataset="org/x").build()
    with pytest.raises(DataError, match="data.dataset is empty"):
        HuggingFaceConfig().build()
