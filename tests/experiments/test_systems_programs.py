# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Commands of `.docs/systems.md` do something else than their default and their like.

A group has a measure (`tests/support/shown_commands.py`), the commands that it shows, and others to
compare them with; all values of a group must differ. Programs are lowered for eight devices and not
compiled. Commands are those of the page, letter by letter.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex

import pytest

from experiments.plan import __main__ as plan
from experiments.serving import __main__ as serving
from jaxmoe.resilience.shared_memory import SNAPSHOTS
from tests.support import shown_commands
from tests.support.runs import ROOT
from tests.support.shown_commands import Measure, program, value_of

PAGE = (ROOT / ".docs" / "systems.md").read_text(encoding="utf-8")
COMMANDS = set(re.findall(r"`((?:pretrain|finetune) [^`]+)`", PAGE))

REPLICAS = "--execution.mesh.replica 4"
SEQUENCES = "--execution.mesh.seq 4"
STAGES = "--execution.mesh.stage 4"
LOSABLE = f"{STAGES} --training.accumulation 2 --parts check_free"


@dataclasses.dataclass(frozen=True)
class Group:
    """Commands of which each must have another value of the measure."""

    measure: Measure
    shown: tuple[str, ...]
    """Flags of commands of the page."""
    beside: tuple[str, ...] = ("",)
    """Flags of commands that they must differ from: the default, or it with what they need."""
    name: str = "pretrain"


GROUPS = {
    "parameterisations": Group(
        program,
        (
            "hyperp",
            "optimizer:adamw parameterization:standard",
            "optimizer:adamw parameterization:mup",
            "optimizer:adamw parameterization:mup_plus_plus",
            "optimizer:adamw parameterization:completep",
            "parameterization:mup_muon optimizer:muon",
            "optimizer:muon --parameterization.matrices muon",
            "optimizer:mkor parameterization:standard",
            "schedule:wsd",
        ),
    ),
    "sequences": Group(
        program,
        (
            *(
                f"{SEQUENCES} execution.sequence_parallel:{kind}"
                for kind in ("ring", "token_ring", "ulysses", "all_gather")
            ),
            "--execution.mesh.data 2 --execution.mesh.seq 4 --execution.fold.seq_inner 2"
            " execution.sequence_parallel:usp",
            "data:files --data.path texts.jsonl --data.packing levels --execution.mesh.seq 4"
            " execution.sequence_parallel:levels",
        ),
        ("", f"{SEQUENCES} execution.sequence_parallel:levels"),
    ),
    "mixers": Group(
        program,
        (
            "model.attention:latent",
            "model.attention:latent model.attention.yarn:yarn",
            "--model.attention.is_gated True",
            "model.attention:shared_keys",
            "model.attention:parallel_streams",
            "--model.layers layer layer model.layers.0.mixer:mamba",
            "hybrid",
        ),
    ),
    "layers": Group(
        program,
        (
            "--model.moe.balancers load_balance router_z",
            "model.moe.capacity:token_rounding --model.moe.capacity.tile 16",
            "diffusion",
            "--model.layers layer layer model.layers.1.feed_forward:ultra_mem",
            "--model.layers layer layer model.layers.1.feed_forward:two_sizes",
            "model.adapter:shared_store",
            "training.objective:swept_layers",
        ),
    ),
    "residuals": Group(
        program,
        (
            "model.residual:hyper",
            "model.residual:ladder",
            "model.loop:loop model.loop.connection:hyperloop",
        ),
        ("", "model.loop:loop"),
    ),
    "estimators": Group(
        program,
        (
            "training.gradients:spsa",
            "training.gradients:seed_pool",
            "training.gradients:evolution",
            f"{REPLICAS} training.gradients:spsa",
            f"{REPLICAS} training.gradients:spsa --training.gradients.payload byte",
        ),
        ("", f"{REPLICAS} training.gradients:spsa --training.gradients.payload float32"),
    ),
    "memory": Group(
        program,
        (
            "--execution.offload.optimizer files --execution.offload.parts 8",
            "--execution.offload.parts 8",
            "--execution.offload.parameters host --execution.remat full",
        ),
        ("", "--execution.offload.optimizer host", "--execution.remat full"),
    ),
    "meshes": Group(
        program,
        (
            "--execution.mesh.tensor 2",
            "--execution.rules zero1",
            "--execution.rules hierarchical",
            "--execution.rules nested",
            "--execution.mesh.data 8 --execution.fold.expert 4",
            "--execution.mesh.tensor 4 --execution.halves 2",
            "--execution.mesh.tensor 4 execution.tensor_products:ring",
        ),
        ("", "--execution.mesh.tensor 4"),
    ),
    "experts": Group(
        program,
        (
            "--execution.mesh.expert 4 execution.dispatcher:all_to_all",
            "--execution.mesh.expert 4 execution.dispatcher:least_loaded",
            "--execution.mesh.expert 4 execution.dispatcher:all_to_all"
            " --execution.dispatcher.token_tables FILE",
        ),
        ("", "--execution.mesh.expert 4"),
    ),
    "stages": Group(
        program,
        (
            f"{STAGES} execution.pipeline:gpipe",
            "--execution.mesh.stage 2 --training.accumulation 2 --execution.pipeline.chunks 2",
            f"{STAGES} --parts check_free",
        ),
        ("", STAGES, "--execution.mesh.stage 2 --training.accumulation 2"),
    ),
    "swapped stages": Group(
        program,
        (f"{LOSABLE} --training.skipping.ratio 0 --training.skipping.order swapped_ends",),
        ("", LOSABLE),
    ),
    "skipping": Group(
        program,
        ("--training.batch_size 64 --training.accumulation 8 --training.skipping.groups 4",),
        ("", "--training.batch_size 64 --training.accumulation 8"),
    ),
    "workers that exchange parameters": Group(
        program,
        (
            *(
                f"{REPLICAS} replicas:{kind}"
                for kind in ("diloco", "streaming", "sparse", "noloco", "co2", "spes")
            ),
            f"{REPLICAS} replicas:diloco --replicas.weights participation",
            f"{REPLICAS} replicas:heterogeneous --replicas.slow 3",
            f"{REPLICAS} replicas:single_merge",
            f"{REPLICAS} replicas:a2cid2",
        ),
        ("", REPLICAS),
    ),
    "workers that exchange gradients": Group(
        program,
        (
            f"{REPLICAS} replicas:econtrol",
            f"{REPLICAS} replicas:coded",
            f"{REPLICAS} replicas:robust",
            f"{REPLICAS} optimizer:adamw parameterization:standard replicas:one_bit_adam",
        ),
        ("", REPLICAS, f"{REPLICAS} optimizer:adamw parameterization:standard"),
    ),
    "adapters": Group(
        program,
        (
            *(
                f"model.adapter:{kind}"
                for kind in (
                    "adalora",
                    "switch_lora",
                    "mixture_of_shards",
                    "multi_head_routing",
                    "lift",
                    "quantised_choices",
                    "lora_mixer",
                    "remix",
                )
            ),
            "training.gradients:surrogate",
            "training.average:balanced",
        ),
        name="finetune",
    ),
    "vocabulary": Group(shown_commands.layout, (STAGES,)),
    "comparisons of devices": Group(
        shown_commands.watched,
        (
            "--gradient_comparison.every 100",
            "--gradient_comparison.every 10",
            "--link_measurements.every 100",
        ),
    ),
    "snapshots": Group(shown_commands.snapshots, ("--snapshots.every 10",)),
    "saves": Group(shown_commands.saves, ("--checkpoint.capture blocking",)),
    "rows": Group(shown_commands.rows, ("--data.partition.part 1/4",)),
}


def test_all_training_commands_of_the_page_are_in_a_group():
    shown = [f"{group.name} {words}" for group in GROUPS.values() for words in group.shown]
    assert len(shown) == len(set(shown)) > 80
    assert COMMANDS == set(shown)


@pytest.mark.slow
@pytest.mark.rows(len(GROUPS))
@pytest.mark.parametrize("name", GROUPS)
def test_each_command_differs_from_its_default_and_its_like(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SNAPSHOTS, str(tmp_path / "snapshots"))
    shown_commands.write_tables(tmp_path / "FILE", devices=4)
    if name == "sequences":
        shown_commands.write_texts(tmp_path / "texts.jsonl")
    group, commands = GROUPS[name], {}
    for words in (*group.beside, *group.shown):
        command = f"{group.name} {words}".strip()
        value = value_of(group.measure, command, tmp_path)
        assert value not in commands, f"{command} does what {commands[value]} does"
        commands[value] = command


@pytest.mark.slow
def test_a_flag_of_the_output_changes_no_program(tmp_path):
    """The measure itself: what does not act on the step leaves its text as it is."""
    usual, other = (
        value_of(program, f"pretrain {words}", tmp_path)
        for words in ("", "--tracking.print_every 3 --checkpoint.keep 5")
    )
    assert usual == other


_ON_H100 = "jaxmoe plan d12 --topology gpu:h100:8 --compiles 0 --execution.mesh.data 8"
PLANS = {
    _ON_H100.replace("h100", "mi250x"): (_ON_H100, "step_seconds"),
    _ON_H100.replace("h100", "mi300x"): (_ON_H100, "step_seconds"),
    _ON_H100: (f"{_ON_H100} --execution.remat none", "memory"),
    _ON_H100.replace("d12", "qwen3_30b_a3b"): (
        f"{_ON_H100.replace('d12', 'qwen3_30b_a3b')} --execution.offload.optimizer host",
        "remedies",
    ),
    "advise --chip mi300x": ("advise", "tables"),
}


@pytest.mark.slow
@pytest.mark.rows(len(PLANS))
@pytest.mark.parametrize("command", PLANS)
def test_each_plan_of_a_study_differs_from_another(command, tmp_path):
    """The figure of `summary.json` that the row is about."""
    assert f"`{command}`" in PAGE
    beside, figure = PLANS[command]
    found = []
    for words in map(shlex.split, (command, beside)):
        main, words = (serving.main, words) if words[0] == "advise" else (plan.main, words[2:])
        main([*words, "--run.directory", str(tmp_path / str(len(found)))])
        summary = json.loads((tmp_path / str(len(found)) / "summary.json").read_text())
        found.append(summary[figure])
    assert found[0] and found[0] != found[1]
