# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each row of what does not combine: its config is refused in words, and the way out is accepted.

To add a row: its example in EXAMPLES, the fields that make both choices and those of the way out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmoe import combinations
from jaxmoe.catalog import choice
from jaxmoe.configs import from_json, to_json
from jaxmoe.contrib.depth.loop import HyperloopConfig, LoopConfig
from jaxmoe.contrib.depth.skipping import SkippingConfig
from jaxmoe.contrib.rl.config import RolloutsConfig
from jaxmoe.execution import OffloadConfig
from jaxmoe.models.config import LayerConfig, ModelOptions
from jaxmoe.models.transformer import forward
from jaxmoe.precision import MixedConfig
from jaxmoe.routing import CapacityConfig
from jaxmoe.run.config import PretrainConfig
from jaxmoe.training.batch_ramp import BatchRampConfig
from sharding import MeshConfig, MoEMesh, make_mesh
from sharding.pipeline import InterleavedConfig
from tests.support.dotted import changed
from tests.support.source_tree import ROOT

Fields = Mapping[str, Any]


def run(fields: Fields) -> PretrainConfig:
    """Return the config of a run with some fields."""
    return changed(PretrainConfig(), fields)


HIERARCHICAL = {"execution.rules": "hierarchical"}
FULLY_SHARDED = {"execution.rules": "fully_sharded"}
HALO = {"execution.precision.matmul": choice("matmul", "halo")()}
FULL = {"execution.precision.matmul": choice("matmul", "full")()}
STAGES = {"execution.mesh.stage": 2}
LEVELS = {"data": choice("data", "files")(path=("*.txt",), packing="levels")}
BEST_FIT = {"data.packing": "best_fit"}
ONE_STAGE = {"execution.mesh.stage": 1}
BRIEF = {"execution.telemetry": "brief"}
DETAILED = {"execution.telemetry": "detailed"}
HALVES = {"execution.halves": 2}
ONE_HALF = {"execution.halves": 1}
SKIPPING = {
    "training.skipping": SkippingConfig(groups=4, ratio=0.25),
    "training.accumulation": 2,
    "model.num_layers": 4,
}
NO_SKIPPING = {"training.skipping": None}
FORWARD = {
    "training.gradients": choice("gradients", "evolution")(),
    "training.clip": None,
    "optimizer": choice("optimizer", "sgd")(),
}
SEED_POOL = FORWARD | {"training.gradients": choice("gradients", "seed_pool")()}
BACKPROP = {"training.gradients": choice("gradients", "backprop")()}
FILES = {"execution.offload": OffloadConfig(optimizer="files")}
IN_HOST = {"execution.offload": OffloadConfig()}
HOST = {"execution.offload.parameters": "host", "execution.remat": "full"}
ON_DEVICE = {"execution.offload.parameters": "device"}
NO_OFFLOAD = {"execution.offload": None}
COMPARED = {"parts": (choice("run_part", "gradient_comparison")(),)}
NO_PARTS = {"parts": ()}
WORKERS = {"replicas": choice("replicas", "diloco")()}
AVERAGE = {"training.average": choice("average", "fixed")()}
NO_WORKERS = {"replicas": choice("replicas", "none")()}
ANSWERS = {
    "training.objective": choice("objective", "policy_gradient")(),
    "rl": RolloutsConfig(prompts=4, group=4, max_tokens=16),
}
ON_ADAPTERS = {
    name: {"model.adapter": choice("adapter", name)()}
    for name in ("lift", "mixture_of_shards", "shared_store")
}
TWO_SIZES = {"model.layers": (LayerConfig(feed_forward=choice("feed_forward", "two_sizes")()),)}
STREAMS = {"model.attention": choice("mixer", "parallel_streams")()}
RING = {"execution.tensor_products": choice("tensor_products", "ring")()}
WHOLE = {"execution.tensor_products": choice("tensor_products", "whole")()}
SEQ = {"execution.mesh.seq": 2}
AUTO = {"execution.sequence_parallel": choice("sequence_parallel", "auto")()}
ZIGZAG = SEQ | {"execution.sequence_parallel": choice("sequence_parallel", "ring")(layout="zigzag")}
CONTIGUOUS = {"execution.sequence_parallel.layout": "contiguous"}
SHARED_KEYS = {"model.attention": choice("mixer", "shared_keys")()}
BIDIRECTIONAL = {"model.attention.is_causal": False}
DIFFUSION = {"training.objective": choice("objective", "masked_diffusion")()}
MKOR = {"optimizer": choice("optimizer", "mkor")()}
SWEPT = {"training.objective": choice("objective", "swept_layers")()}
ONE_BIT = {"replicas": choice("replicas", "one_bit_adam")(workers=2)}
BYTES = choice("tokenizer", "bytes")()
TRAINED = choice("tokenizer", "trained")()
SWITCH = {"model.adapter": choice("adapter", "switch_lora")()}
MODULES = {
    "model.options": ModelOptions(predictor=choice("predictor", "multi_token_prediction")()),
    "training.objective": choice("objective", "multi_token_prediction")(),
}
NEXT_TOKEN = {"training.objective": choice("objective", "next_token")()}
REMIX = {"model.adapter": choice("adapter", "remix")()}


def rollouts(**fields: Any) -> Fields:
    """Return the fields of training on answers, with some options of the rollouts."""
    return ANSWERS | {
        "rl": RolloutsConfig(prompts=4, group=4, max_tokens=16),
        **{f"rl.{name}": value for name, value in fields.items()},
    }


EXAMPLES: tuple[tuple[Fields, Fields], ...] = (
    (
        {"execution.pipeline": InterleavedConfig(chunks=2), "execution.mesh.data": 8},
        {"execution.pipeline": InterleavedConfig()},
    ),
    (STAGES | SHARED_KEYS, ONE_STAGE),
    (STAGES | {"model.options": ModelOptions(has_head_bias=True)}, ONE_STAGE),
    ({"execution.precision.mixed": MixedConfig()}, {"execution.precision.mixed": None}),
    (
        {
            "execution.mesh.seq": 4,
            "execution.sequence_parallel": choice("sequence_parallel", "usp")(ulysses=2),
        },
        {"execution.fold": MoEMesh(seq_inner=2)},
    ),
    (ZIGZAG | {"model.attention": choice("mixer", "mamba2")()}, CONTIGUOUS),
    (
        SEQ | AUTO | {"model.attention": choice("mixer", "sparse_latent")()},
        {"execution.mesh.seq": 1},
    ),
    (
        {
            "model.attention": choice("mixer", "lightning")(decay_layers=4),
            "model.loop": LoopConfig(),
        },
        {"model.loop": None},
    ),
    (ZIGZAG | {"model.moe.capacity": CapacityConfig()}, CONTIGUOUS),
    (
        {
            "model.moe.router": choice("router", "soft_moe")(),
            "model.moe.gate": choice("gate", "softmax")(),
            "model.moe.balancers": (),
            "execution.dispatcher": choice("dispatcher", "all_to_all")(),
            "execution.mesh.tensor": 2,
        }
        | BIDIRECTIONAL
        | DIFFUSION,
        {"execution.dispatcher": choice("dispatcher", "local")()},
    ),
    (BIDIRECTIONAL, DIFFUSION),
    (DIFFUSION, BIDIRECTIONAL),
    (
        {"data": choice("data", "tokenizer_only")(), "data.tokenizer": TRAINED},
        {"data.tokenizer": BYTES},
    ),
    (
        {
            "data": choice("data", "mixture")(),
            "data.partition": choice("subset", "clusters")(part="1/4"),
        },
        {"data.partition": None},
    ),
    (
        {"data": choice("data", "chat")(path=("*.jsonl",)), "data.template": "tokenizer"},
        {"data.template": "chatml"},
    ),
    (STAGES | {"model.adapter": choice("adapter", "lift")()}, ONE_STAGE),
    (STAGES | DETAILED, BRIEF),
    (
        STAGES | {"execution.dispatcher": choice("dispatcher", "all_to_all")(token_tables="t")},
        {"execution.dispatcher.token_tables": None},
    ),
    (STAGES | LEVELS, BEST_FIT),
    (STAGES | {"execution.offload.parts": 2}, {"execution.offload.parts": 1}),
    (STAGES | COMPARED, NO_PARTS),
    (RING | HALO, FULL),
    (RING | {"execution.precision.weights": "w8a16"}, WHOLE),
    ({"execution.kernels.grouped_swiglu": "reference"} | HALO, FULL),
    ({"execution.kernels.quantized_matmul": "reference"}, HALO),
    ({"execution.kernels.grouped_matmul": "reference"}, HALO),
    (
        {"execution.mesh.seq": 2},
        AUTO,
    ),
    (
        {
            "model.has_tied_embeddings": True,
            "parameterization": choice("parameterization", "hyperp")(),
        },
        {"parameterization.tied_embeddings": "adamw"},
    ),
    (
        {
            "model.moe.router": choice("router", "expert_choice")(),
            "model.moe.gate": choice("gate", "softmax")(),
            "model.moe.balancers": (),
        },
        {
            "model.attention.is_causal": False,
            "training.objective": choice("objective", "masked_diffusion")(),
        },
    ),
    ({"training.batch_ramp": BatchRampConfig(stages=1)} | LEVELS, BEST_FIT),
    (
        {
            "training.objective": choice("objective", "masked_diffusion")(),
            "model.attention.is_causal": False,
            "data": choice("data", "chat")(path=("*.jsonl",)),
        },
        {"data.train_on": "all"},
    ),
    (
        {"training.objective": ANSWERS["training.objective"]},
        {"rl": ANSWERS["rl"]},
    ),
    (
        {"rl": ANSWERS["rl"]},
        {"training.objective": ANSWERS["training.objective"]},
    ),
    (
        ANSWERS | {"training.batch_ramp": BatchRampConfig(stages=1)},
        {"training.batch_ramp": None},
    ),
    (ANSWERS | COMPARED, NO_PARTS),
    (
        {
            "checkpoint.initial.path": "runs/a",
            "checkpoint.initial.state": "all",
            "checkpoint.initial.mapping": "rules.py",
        },
        {"checkpoint.initial.mapping": None},
    ),
    (ON_ADAPTERS["lift"] | IN_HOST, NO_OFFLOAD),
    ({"execution.offload": OffloadConfig(directory="optimizer")}, FILES),
    (ON_ADAPTERS["shared_store"] | HIERARCHICAL, FULLY_SHARDED),
    (ON_ADAPTERS["shared_store"] | HOST, ON_DEVICE),
    (
        ON_ADAPTERS["shared_store"] | {"execution.precision.weights": "w8a16"},
        {"execution.precision.weights": "floating"},
    ),
    # Adapters.
    (ON_ADAPTERS["mixture_of_shards"] | STAGES, ONE_STAGE),
    (
        ON_ADAPTERS["mixture_of_shards"] | {"execution.rules": "zero2"},
        {"execution.rules": "fully_sharded"},
    ),
    (ON_ADAPTERS["mixture_of_shards"] | HOST, ON_DEVICE),
    (ON_ADAPTERS["shared_store"] | {"execution.mesh.expert": 2}, {"execution.mesh.expert": 1}),
    (ON_ADAPTERS["shared_store"] | {"execution.mesh.tensor": 2}, {"execution.mesh.tensor": 1}),
    (
        SWITCH | {"execution.precision.weights": "w8a16"},
        {"execution.precision.weights": "floating"},
    ),
    (
        SWITCH | {"execution.precision.parameters": "bfloat16"},
        {"execution.precision.parameters": "float32"},
    ),
    (IN_HOST | AVERAGE, NO_OFFLOAD),
    (REMIX | STAGES, ONE_STAGE),
    (REMIX | FORWARD, BACKPROP),
    (REMIX | SKIPPING, NO_SKIPPING),
    (REMIX | {"model.loop": LoopConfig()}, {"model.loop": None}),
    (REMIX | HALVES, ONE_HALF),
    # Halves, loops and mixers.
    (STAGES | {"model.loop": LoopConfig()}, {"model.loop": None}),
    (
        STREAMS | {"model.layers": (LayerConfig(), LayerConfig(mixer=choice("mixer", "mamba")()))},
        {"model.layers": ()},
    ),
    (STAGES | STREAMS, ONE_STAGE),
    (HALVES | STAGES, ONE_STAGE),
    (
        HALVES | {"execution.dispatcher": choice("dispatcher", "all_to_all_dropping")()},
        {"execution.dispatcher": choice("dispatcher", "all_to_all")()},
    ),
    (HALVES | STREAMS, ONE_HALF),
    (HALVES | {"model.moe.capacity": CapacityConfig()}, {"model.moe.capacity": None}),
    (
        HALVES | {"model.moe.router": choice("router", "sinkhorn")(), "model.moe.balancers": ()},
        ONE_HALF,
    ),
    (TWO_SIZES | HALVES, ONE_HALF),
    (TWO_SIZES | STAGES, ONE_STAGE),
    (HALVES | SHARED_KEYS, ONE_HALF),
    (SEQ | AUTO | STREAMS, {"execution.mesh.seq": 1}),
    (
        {
            "model.loop": LoopConfig(connection=HyperloopConfig()),
            "model.residual": choice("residual", "ladder")(),
        },
        {"model.residual": choice("residual", "standard")()},
    ),
    # State outside of the devices.
    (FILES | STAGES, ONE_STAGE),
    (FILES | HOST | FILES, ON_DEVICE),
    (FILES | DETAILED, BRIEF),
    (FILES | {"parts": (choice("run_part", "recomputation")(),)}, NO_PARTS),
    (FILES | {"parts": (choice("run_part", "snapshots")(),)}, IN_HOST),
    (FILES | {"parts": (choice("run_part", "check_free")(),)}, NO_PARTS),
    (HOST | {"execution.remat": "dots"}, {"execution.remat": "offload"}),
    (HOST | {"execution.remat_dense": "none"}, {"execution.remat_dense": "full"}),
    (HOST | STAGES, ONE_STAGE),
    (HOST | {"execution.rules": "zero1"}, {"execution.rules": "fully_sharded"}),
    (HOST | DETAILED, ON_DEVICE),
    # Gradients.
    (FORWARD | STAGES, ONE_STAGE),
    (SKIPPING | FORWARD, NO_SKIPPING),
    (SKIPPING | {"training.accumulation": 1}, {"training.accumulation": 2}),
    (SKIPPING | STAGES, {"execution.mesh.stage": 4}),
    (
        SKIPPING | {"execution.mesh.stage": 4, "execution.pipeline": choice("pipeline", "gpipe")()},
        {"execution.pipeline": choice("pipeline", "interleaved")()},
    ),
    (
        SKIPPING
        | {
            "execution.mesh.stage": 4,
            "execution.pipeline": InterleavedConfig(weight_gradients="deferred"),
        },
        {"execution.pipeline": InterleavedConfig()},
    ),
    (
        SKIPPING
        | {
            "training.skipping": SkippingConfig(groups=4, ratio=0.0, order="swapped_ends"),
            "execution.mesh.data": 8,
        },
        {"execution.mesh.stage": 4},
    ),
    (
        SKIPPING | {"training.accumulated_balance": "two_pass", "execution.mesh.stage": 4},
        {"training.accumulated_balance": "buffer"},
    ),
    (SKIPPING | DETAILED, BRIEF),
    (SKIPPING | LEVELS, BEST_FIT),
    (FORWARD | HIERARCHICAL, FULLY_SHARDED),
    (FORWARD | HOST, ON_DEVICE),
    (FORWARD | DETAILED, BRIEF),
    (FORWARD | COMPARED, NO_PARTS),
    (FORWARD | LEVELS, BEST_FIT),
    (
        FORWARD | {"execution.mesh.replica": 2, "execution.rules": "hybrid"},
        {"execution.rules": "fully_sharded"},
    ),
    (
        FORWARD
        | {
            "execution.mesh.replica": 2,
            "execution.mesh.data": 4,
            "execution.fold": MoEMesh(expert=2),
        },
        {"execution.mesh.replica": 1},
    ),
    (FORWARD | {"training.clip": 1.0}, {"training.clip": None}),
    (SEED_POOL | {"training.clip": 1.0}, {"training.clip": None}),
    (
        SEED_POOL | {"optimizer": choice("optimizer", "adamw")(weight_decay=0.0)},
        {"optimizer": choice("optimizer", "sgd")()},
    ),
    (SEED_POOL | {"optimizer.momentum": 0.9}, {"optimizer.momentum": 0.0}),
    (SEED_POOL | {"optimizer.weight_decay": 0.1}, {"optimizer.weight_decay": 0.0}),
    # Workers.
    (WORKERS | STAGES, ONE_STAGE),
    (WORKERS | {"execution.rules": "hybrid"}, {"execution.rules": "zero2"}),
    (WORKERS | IN_HOST, NO_OFFLOAD),
    (WORKERS | LEVELS, BEST_FIT),
    (WORKERS | {"parts": (choice("run_part", "check_free")(),)}, NO_PARTS),
    (WORKERS | COMPARED, NO_PARTS),
    (WORKERS | FORWARD, NO_WORKERS),
    (WORKERS | AVERAGE, NO_WORKERS),
    (WORKERS | ANSWERS, NO_WORKERS),
    (WORKERS | ON_ADAPTERS["lift"], NO_WORKERS),
    (ONE_BIT | {"optimizer.beta1": 0.8}, {"optimizer.beta1": 0.9}),
    (
        ONE_BIT | {"optimizer": choice("optimizer", "sgd")()},
        {"optimizer": choice("optimizer", "adamw")()},
    ),
    # Answers.
    (rollouts() | AVERAGE, {"rl.epochs": 1}),
    (rollouts(epochs=1, minibatches=2) | AVERAGE, {"rl.minibatches": 1}),
    (rollouts(sync="exact"), {"rl.staleness": 1, "rl.old": "engine"}),
    (rollouts(staleness=1), {"rl.old": "engine"}),
    (rollouts(old="engine", truncation=2.0), {"rl.truncation": None}),
    (rollouts() | {"training.batch_size": 32}, {"training.batch_size": 16}),
    # Objectives and optimisers.
    (MKOR | {"training.gradients": FORWARD["training.gradients"], "training.clip": None}, BACKPROP),
    (MKOR | STAGES, ONE_STAGE),
    (MKOR | HIERARCHICAL, FULLY_SHARDED),
    (
        MKOR | {"model.attention": choice("mixer", "mamba2")()},
        {"optimizer": choice("optimizer", "adamw")()},
    ),
    (MKOR | HALO, FULL),
    (MKOR | IN_HOST | {"execution.offload.parts": 2}, {"execution.offload.parts": 1}),
    (SWEPT | STAGES, ONE_STAGE),
    (SWEPT | SEQ | AUTO, {"execution.mesh.seq": 1}),
    (SWEPT | FORWARD, BACKPROP),
    (SWEPT | MKOR, {"optimizer": choice("optimizer", "adamw")()}),
    (MODULES | NEXT_TOKEN, {"model.options": None}),
    (MODULES | STAGES, ONE_STAGE),
    (MODULES | {"model.adapter": choice("adapter", "lora")()}, {"model.adapter": None}),
    (MODULES | FORWARD, BACKPROP),
    (MODULES | MKOR, {"optimizer": choice("optimizer", "adamw")()}),
    (
        {
            "execution.mesh.seq": 6,
            "execution.sequence_parallel": choice("sequence_parallel", "levels")(),
        },
        {"execution.mesh.seq": 4},
    ),
)
"""Fields that make both choices of a row, and those of the way out."""


def rows_of(fields: Fields) -> dict[int, str]:
    """Return the refusals of a config, which is made without checks, by the place of the row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combinations, "_check", lambda config, names: None)
        config = run(fields)
    messages = {place: row.refusal(config) for place, row in enumerate(ALL)}
    return {place: message for place, message in messages.items() if message is not None}


ALL = [row for rows in combinations.all_rows().values() for row in rows]


@pytest.mark.parametrize(("fields", "way_out"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_a_row_is_refused_in_words_and_its_way_out_is_accepted(fields, way_out):
    ((place, message),) = rows_of(fields).items()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(fields)
    choices = (ALL[place].first, ALL[place].second)
    assert ": " in message and "{" not in message
    assert all((one.shown or one.path).split(".")[-1] in message for one in choices), message
    fields = {path: value for path, value in fields.items() if path not in way_out}
    config = run({**fields, **way_out})
    assert from_json(PretrainConfig, to_json(config)) == config


def test_every_row_has_an_example():
    places = {place for fields, _ in EXAMPLES for place in rows_of(fields)}
    missing = [row for place, row in enumerate(ALL) if place not in places]
    assert not missing, [f"{row.first.text} x {row.second.text}" for row in missing]
    assert len(EXAMPLES) == len(ALL)


def test_the_page_lists_every_row(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / ".docs"))
    import combination_page

    combination_page.write(tmp_path)
    lines = (tmp_path / "combinations.md").read_text(encoding="utf-8").splitlines()
    for row in ALL:
        assert combination_page.line(row) in lines
    assert sum(line.startswith("| `") for line in lines) == len(ALL)
    assert not [line for line in lines if "{" in line]


@pytest.mark.parametrize(
    ("fields", "sizes", "text"),
    [
        ({}, SEQ, "execution.sequence_parallel:none has whole sequences"),
        (STREAMS | AUTO, SEQ, "execution.mesh.seq=2 cuts sequences"),
        (ZIGZAG | {"model.moe.capacity": CapacityConfig()}, SEQ, "layout=zigzag is another"),
        (HALVES | STREAMS, {}, "execution.halves=2 takes every other row"),
    ],
)
def test_a_forward_pass_refuses_pairs_on_the_current_mesh(fields, sizes, text):
    config = run({path: value for path, value in fields.items() if path not in (*sizes, *HALVES)})
    execution = dataclasses.replace(config.execution, halves=fields.get("execution.halves", 1))
    axes = {path.split(".")[-1]: size for path, size in sizes.items()}
    mesh = make_mesh(MeshConfig(data=-1, **axes))
    tokens = jnp.zeros((8, 64), jnp.int32)
    with jax.set_mesh(mesh), pytest.raises(combinations.CombinationError, match=re.escape(text)):
        jax.eval_shape(functools.partial(forward, config.model, execution), {}, tokens)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_model_leaves_open_is_refused_as_in_the_whole_table(stage):
    """`check_between` remembers the rows of a model, and refuses what `check` does."""

    def message(check, model, execution):
        try:
            check(model=model, execution=execution)
        except combinations.CombinationError as error:
            return str(error)
        return ""

    refused = 0
    for fields, _ in EXAMPLES:
        paths = {path.partition(".")[0] for path in fields}
        if not paths <= {"model", "execution"}:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(combinations, "_check", lambda config, names: None)
            config = run({"execution.mesh.stage": stage} | fields)
        pair = config.model, config.execution
        between = message(combinations.check_between, *pair)
        with contextlib.suppress(combinations.CombinationError):
            combinations.check(model=config.model)
            combinations.check(execution=config.execution)
            assert between == message(combinations.check, *pair)
            refused += bool(between)
    assert refused > 2
