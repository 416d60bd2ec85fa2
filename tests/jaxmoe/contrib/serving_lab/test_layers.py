# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pieces that stop between layers: their rules, and who sees the sequences in between."""

from __future__ import annotations

import pytest

from jaxmoe.contrib.serving_lab.layers import LayersInstance, LayersPiece
from jaxmoe.serve import Plan, PlanError, PromptPiece
from jaxmoe.serve.plan import Eviction
from tests.jaxmoe.serve.test_rules import served
from tests.support.page_executor import PageExecutor


def test_the_layers_of_a_piece_follow_each_other():
    instance = served(LayersInstance, capabilities=frozenset({"pages", "layers"}))
    executor = PageExecutor(instance.facts)
    executor.run = lambda step: {}  # the prompt ends with the last layers only

    def piece(count, layers):
        return PromptPiece(2, count) if layers is None else LayersPiece(2, count, layers)

    def through(layers, count=2):
        (step,) = instance.start(Plan.of([], [piece(count, layers)]), 2.0)
        assert [work.draws for work in step.works] == [False]
        instance.apply(step, {}, 3.0)

    for wrong in ((1, 2), (0, 4), (0, 0)):
        with pytest.raises(PlanError, match="sequence 2 is at layer 0"):
            through(wrong)
    through((0, 1))
    for wrong, count in (((0, 1), 2), ((1, 2), 1), (None, 2)):
        with pytest.raises(PlanError, match="sequence 2 is at layer 1"):
            through(wrong, count)
    through((1, 2))
    (step,) = instance.start(Plan.of([], [LayersPiece(2, 2, (2, 3))]), 2.0)
    assert [work.draws for work in step.works] == [True]
    assert instance.queues.running[2].computed == 12


def test_an_executor_without_layers_is_refused_such_a_piece():
    instance = served(LayersInstance)
    with pytest.raises(PlanError, match="sequence 2 is at layer 0") as error:
        instance.start(Plan.of([], [LayersPiece(2, 2, (0, 1))]), 2.0)
    assert error.value.rule == "layers"


def test_a_sequence_between_layers_is_busy_but_for_its_policy_until_it_is_evicted():
    instance = served(LayersInstance, capabilities=frozenset({"pages", "layers"}))
    (step,) = instance.start(Plan.of([], [LayersPiece(2, 2, (0, 1))]), 2.0)
    assert [one.id for one in instance.view(2.0).busy] == [2]
    instance.apply(step, {}, 3.0)
    view = instance.view(3.0)
    assert [one.id for one in view.running] == [0, 1, 2] and not view.busy
    assert (view.progress[2].layers, view.progress[2].count) == (1, 2)
    sequence = instance.queues.running[2]
    assert sequence.is_busy and instance.facts.victim([sequence]) == (sequence, "recompute")
    instance.start(Plan.of([], evict=[Eviction(2)]), 3.0)
    assert not sequence.is_busy and not instance.view(3.0).progress
