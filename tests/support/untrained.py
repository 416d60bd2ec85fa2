# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A run with its initial state, to be converted: of a model that compiles in seconds."""

from __future__ import annotations

import dataclasses
import pathlib

from experiments.recipes.markov import markov
from jaxmoe.checkpoint import save_checkpoint
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.run.directory import RunDirectory


def small_config() -> PretrainConfig:
    """A model with two blocks of 16 inputs in most matrices."""
    model = ModelConfig(
        vocab_size=16,
        num_layers=1,
        embed_dim=32,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16),
        moe=MoEConfig(num_experts=4, top_k=2, expert_dim=16),
    )
    return dataclasses.replace(
        markov(),
        model=model,
        training=TrainingConfig(steps=30, batch_size=8, sequence_length=16),
        evaluation=EvaluationConfig(batches=1),
    )


def untrained_run(path: pathlib.Path) -> pathlib.Path:
    """The directory of a run of `small_config`, with a checkpoint of its initial state."""
    directory, config = RunDirectory(path), small_config()
    directory.acquire()
    directory.check_config(config)
    assembly = assemble(config)
    save_checkpoint(
        directory.checkpoints_directory,
        assembly.new_state(),
        step=1,
        config=config,
        data=assembly.loader.position(1),
    )
    directory.release()
    return directory.path
