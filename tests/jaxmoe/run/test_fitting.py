# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a run that follow from its data."""

import dataclasses
import json

import pytest

from experiments.recipes.tiny import tiny
from jaxmoe.configs import to_json
from jaxmoe.data import FilesConfig
from jaxmoe.data.tokenizer import TrainedConfig
from jaxmoe.run.config import CheckpointConfig, InitialConfig
from jaxmoe.run.fitting import fit_to_data

SIZES = {"model.vocab_size", "training.batch_size", "evaluation.batch_size", "evaluation.batches"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run on 20 documents with a vocabulary of their own, and its data."""
    folder = tmp_path_factory.mktemp("documents")
    texts = [f"the quick and the {number} " * 5 for number in range(20)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    path = (str(folder / "a.jsonl"),)
    data = FilesConfig(path=path, tokenizer=TrainedConfig(vocab_size=300), cache=str(folder))
    return dataclasses.replace(tiny(), data=data), data.build(0)


def _sizes(config):
    evaluation = config.evaluation
    return (
        config.model.vocab_size,
        config.training.batch_size,
        config.held_out_batch_size,
        evaluation.batches,
    )


def test_sizes_that_are_not_set_fit_the_data_and_are_said(small):
    config, source = small
    length = config.training.sequence_length
    rows, held_out = (source.num_rows(split, length) for split in ("train", "validation"))
    fitted, texts = fit_to_data(config, source, (), batch_shards=1)
    assert _sizes(fitted) == (source.vocab_size, rows, held_out, 1)
    assert rows < config.training.batch_size and held_out < rows
    assert {text.partition("=")[0] for text in texts} == SIZES
    assert fit_to_data(fitted, source, (), batch_shards=1) == (fitted, ())


def test_sizes_that_are_set_stay(small):
    config, source = small
    assert fit_to_data(config, source, SIZES, batch_shards=1) == (config, ())


def test_rows_of_a_batch_stay_a_multiple_of_the_devices_that_share_it(small):
    config, source = small
    fitted, _ = fit_to_data(config, source, (), batch_shards=2)
    assert fitted.training.batch_size % 2 == 0
    assert fit_to_data(config, source, (), batch_shards=64)[0].training == config.training


def test_the_vocabulary_of_a_model_to_begin_with_stays(small):
    config, source = small
    checkpoint = CheckpointConfig(initial=InitialConfig(path="runs/base"))
    config = dataclasses.replace(config, checkpoint=checkpoint)
    fitted, _ = fit_to_data(config, source, (), batch_shards=1)
    assert fitted.model == config.model


def test_a_run_that_is_resumed_on_other_devices_keeps_its_sizes(small):
    config, source = small
    saved, _ = fit_to_data(config, source, (), batch_shards=1)
    fitted, _ = fit_to_data(config, source, (), batch_shards=2)
    resumed, _ = fit_to_data(config, source, (), batch_shards=2, saved=to_json(saved))
    assert resumed.training == saved.training != fitted.training
    damaged, _ = fit_to_data(config, source, (), batch_shards=2, saved={"training": None})
    assert damaged == fitted
