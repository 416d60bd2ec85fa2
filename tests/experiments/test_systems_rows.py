# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What headers say of the commands by which `.docs/systems.md` shows layers and adapters."""

from __future__ import annotations

import re
import shlex

import pytest

from experiments.cli import flags as cli
from experiments.recipes import DEFAULT, RECIPES
from jaxmoe.adapters import AdaLoraConfig
from jaxmoe.contrib.adapters.switch_lora import SwitchLoraConfig
from jaxmoe.run.reporting.header import experts_in_words, few_rows_in_words
from tests.support.runs import ROOT

TABLE = (ROOT / ".docs" / "systems.md").read_text()
COMMANDS = re.findall(r"`pretrain((?: [^`]*)?)`", TABLE)


def parsed(command: str):
    return cli.parse(RECIPES, DEFAULT, shlex.split(command), "pretrain", "")[1]


@pytest.mark.parametrize(("kind", "layers"), [("ultra_mem", 2), ("two_sizes", 2), ("mamba", 4)])
def test_layers_of_a_period_are_those_that_are_named(kind, layers):
    """The others keep the experts, and the header counts them."""
    (command,) = (command for command in COMMANDS if command.endswith(f":{kind}"))
    model = parsed(command).model
    assert model.num_moe_layers == layers
    wanted = "8 experts, top-2" + ("" if layers == model.num_layers else " in 2 of them")
    assert experts_in_words(model) == wanted


def test_a_period_of_one_layer_has_no_experts():
    model = parsed("--model.layers layer model.layers.0.feed_forward:ultra_mem").model
    assert experts_in_words(model) == "no experts (no layer has those of model.moe)"
    assert experts_in_words(parsed("model.moe:none").model) == "dense"


def test_micro_batches_of_few_tokens_say_what_they_cost():
    assert few_rows_in_words(2048, 1) is None, "a whole batch"
    assert few_rows_in_words(8192, 8) is None, "a thousand rows keep the products busy"
    note = few_rows_in_words(2048, 8)
    assert note is not None and note.startswith("8 micro-batches of 256 tokens on a device: ")


def test_adapters_say_where_their_steps_are_not_those_of_the_run():
    assert AdaLoraConfig().note_on(120) is None
    note = AdaLoraConfig().note_on(100)
    assert note is not None and "adapter.final=120 lies behind the last step, 100" in note
    assert SwitchLoraConfig().note_on(200) is None
    note = SwitchLoraConfig().note_on(1000)
    assert note is not None and "the run has 1000 steps" in note
