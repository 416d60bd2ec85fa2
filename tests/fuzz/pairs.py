# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws two choices that no row of `jaxmoe/combinations.py` refuses, and compares a step.

A small run makes both choices on 8 devices, and on one device where neither names the mesh. The
step must be that of one device that computes plainly: what the table does not name combines. A
refusal that is no row is an outcome of its own, `refused`: a size that does not divide, or a row
that is missing.

To add a choice: a row in CHOICES of `tests/fuzz/pairs.py`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe import choices, combinations
from jaxmoe.catalog import choice, names
from jaxmoe.configs import to_json
from jaxmoe.contrib.depth.loop import LoopConfig
from jaxmoe.contrib.depth.skipping import SkippingConfig
from jaxmoe.data import MarkovConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, LayerConfig, ModelConfig, ModelOptions, MoEConfig
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.routing import CapacityConfig, TokenRoundingConfig
from jaxmoe.run.assemble import Assembly, assemble
from jaxmoe.run.config import EvaluationConfig, PretrainConfig, TrainingConfig
from jaxmoe.training.guard import GuardConfig
from sharding import MeshConfig, MoEMesh
from sharding.state_layouts import STATE_LAYOUTS
from tests.fuzz.meshes import Reference, compare
from tests.fuzz.outcome import Outcome, pick, refusal
from tests.support.dotted import changed

Fields = Mapping[str, Any]

BASE = PretrainConfig(
    model=ModelConfig(
        vocab_size=32,
        num_layers=4,
        embed_dim=32,
        attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=8),
        moe=MoEConfig(num_experts=8, top_k=2, expert_dim=16),
        dense_dim=32,
    ),
    data=MarkovConfig(order=1, vocab_size=16),
    training=TrainingConfig(
        steps=8,
        batch_size=16,
        sequence_length=16,
        accumulation=1,
        guard=GuardConfig(max_norm_ratio=None),
    ),
    optimizer=AdamWConfig(epsilon=1e-2),  # at 1e-8 noise has a sign
    schedule=LinearConfig(warmup_steps=1),
    execution=ExecutionConfig(precision=PrecisionPolicy(compute="float32")),
    evaluation=EvaluationConfig(batches=1, batch_size=8),
)
FORWARD = {"training.clip": None, "optimizer": choice("optimizer", "sgd")()}
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8}


def _members(path: str, kind: str) -> tuple[Fields, ...]:
    """Return one choice for each member of a kind."""
    return tuple({path: choice(kind, name)()} for name in names(kind))


def _optimizer(name: str) -> Fields:
    """Return the choice of an optimiser, which leaves noise small."""
    config = choice("optimizer", name)()
    if hasattr(config, "epsilon"):
        config = dataclasses.replace(config, epsilon=1e-2)
    return {"optimizer": config}


def _router(name: str) -> Fields:
    """Return the choice of a router, with the gate that fits it and without balancers."""
    router = choice("router", name)()
    gate = "softmax" if router.traits.has_own_gates else "renormalized"
    return {
        "model.moe.router": router,
        "model.moe.gate": choice("gate", gate)(),
        "model.moe.balancers": (),
    }


MESHES: tuple[Fields, ...] = (
    {"execution.mesh": MeshConfig(data=8)},
    {"execution.mesh": MeshConfig(data=2, expert=4)},
    {"execution.mesh": MeshConfig(data=4, tensor=2)},
    {"execution.mesh": MeshConfig(replica=2, data=4)},
    {"execution.mesh": MeshConfig(stage=2, data=4), "training.accumulation": 2},
    {"execution.mesh": MeshConfig(stage=4, data=2), "training.accumulation": 4},
    {"execution.mesh": MeshConfig(data=8), "execution.fold": MoEMesh(expert=2)},
    *(
        {
            "execution.mesh": MeshConfig(data=4, seq=2),
            "execution.sequence_parallel": choice("sequence_parallel", name)(),
        }
        for name in ("auto", "ring", "ulysses", "all_gather", "token_ring")
    ),
)
CHOICES: Mapping[str, tuple[Fields, ...]] = {
    "mesh": MESHES,
    "rules": tuple({"execution.rules": name} for name in STATE_LAYOUTS),
    "dispatcher": (
        *_members("execution.dispatcher", "dispatcher"),
        *(
            {"execution.dispatcher": choice("dispatcher", name)(experts_keep="inputs")}
            for name in ("all_to_all", "all_to_all_dropping")
        ),
    ),
    "pipeline": (
        {"execution.pipeline": choice("pipeline", "gpipe")()},
        {"execution.pipeline": choice("pipeline", "interleaved")(chunks=2)},
        {"execution.pipeline": choice("pipeline", "interleaved")(weight_gradients="deferred")},
    ),
    "remat": tuple({"execution.remat": name} for name in ("full", "dots", "offload")),
    "memory": (
        {"execution.offload.optimizer": "host"},
        {"execution.offload.parts": 2},
        {"execution.offload.parameters": "host", "execution.remat": "full"},
    ),
    "telemetry": ({"execution.telemetry": "detailed"},),
    "unroll": ({"execution.unroll": 2},),
    "loss_chunk": ({"execution.loss_chunk": 8},),
    "tensor_products": _members("execution.tensor_products", "tensor_products"),
    "kernels": tuple({"execution.kernels.attention": name} for name in ("xla", "reference")),
    "attention": (
        {"model.attention": choice("mixer", "latent")(num_heads=8)},
        {"model.attention": choice("mixer", "shared_keys")(**HEADS)},
        {"model.attention": choice("mixer", "parallel_streams")(**HEADS)},
        {"model.attention": AttentionConfig(**HEADS, window=5)},
        {"model.layers": (LayerConfig(), LayerConfig(mixer=choice("mixer", "mamba")()))},
        {"model.layers": (LayerConfig(), LayerConfig(mixer=choice("mixer", "mamba2")()))},
    ),
    "loop": ({"model.loop": LoopConfig(first=1, last=2)},),
    "residual": _members("model.residual", "residual"),
    "norm": _members("model.norm", "norm"),
    "norm_place": (
        {"model.options": ModelOptions(norm_place="after")},
        {"model.options": ModelOptions(norm_place="both")},
    ),
    "dense_layers": ({"model.dense_layers": (0,)},),
    "softcap": ({"model.options": ModelOptions(logits_softcap=2.0)},),
    "tied": ({"model.has_tied_embeddings": True},),
    "router": tuple(map(_router, names("router"))),
    "capacity": (
        {"model.moe.capacity": CapacityConfig(factor=1.5)},
        {"model.moe.capacity": TokenRoundingConfig(tile=2)},
    ),
    "shared": ({"model.moe.num_shared_experts": 1},),
    "adapter": _members("model.adapter", "adapter"),
    "optimizer": tuple(map(_optimizer, names("optimizer"))),
    "accumulation": ({"training.accumulation": 2}, {"training.accumulation": 4}),
    "balance": ({"training.accumulated_balance": "two_pass", "training.accumulation": 2},),
    "clip": ({"training.clip": None},),
    "skipping": (
        {"training.skipping": SkippingConfig(groups=4, ratio=0.25), "training.accumulation": 2},
    ),
    "average": _members("training.average", "average"),
    "gradients": tuple(
        {"training.gradients": choice("gradients", name)()} | FORWARD
        for name in names("gradients")
        if name != "backprop"
    ),
    "objective": (
        {
            "training.objective": choice("objective", "masked_diffusion")(),
            "model.attention.is_causal": False,
        },
        {"training.objective": choice("objective", "swept_layers")()},
        {
            "training.objective": choice("objective", "multi_token_prediction")(),
            "model.options": ModelOptions(
                predictor=choice("predictor", "multi_token_prediction")(depth=2)
            ),
        },
    ),
}
"""Choices by field; one draw makes choices of two fields."""


def check(rng: np.random.Generator, place: pathlib.Path) -> Outcome:
    """Compare a step of a run with two drawn choices with that of one device.

    Args:
        rng: Generator of the draw.
        place: Empty directory; unused.
    """
    del place
    return compare_with(draw(rng))


def compare_with(fields: Fields) -> Outcome:
    """Compare a step of a run with some fields with that of one device.

    Args:
        fields: Values by dotted path.
    """
    text = ", ".join(choices.spell_choice(*item) for item in fields.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # advice on combinations
        try:
            assembly = assemble(changed(BASE, fields))
        except ValueError as error:
            return Outcome("refused", f"{text}: {refusal(error)}")
        print(text, flush=True)
        reference = _reference(assembly)
        outcome = compare(assembly, reference)
        if any(path.startswith("execution.") for path in fields) and "execution.mesh" not in fields:
            config = changed(BASE, {**fields, "execution.mesh": MeshConfig()})
            assembly = assemble(config, devices=list(assembly.mesh.devices.flat[:1]))
            outcome = max(outcome, compare(assembly, reference))  # unstable, if one is
    return outcome._replace(text=f"{text} {outcome.text}")


_REFERENCES: dict[str, Reference] = {}
"""Runs on one device by the JSON of their config: most choices of an execution share one."""


def _reference(assembly: Assembly) -> Reference:
    reference = Reference(assembly, np.random.default_rng(0), num_steps=1)
    return _REFERENCES.setdefault(json.dumps(to_json(reference.config)), reference)


def draw(rng: np.random.Generator) -> Fields:
    """Return the fields of two choices that no row refuses."""
    while True:
        first, second = (str(name) for name in rng.permutation(sorted(CHOICES))[:2])
        fields = {**pick(rng, CHOICES[first]), **pick(rng, CHOICES[second])}
        if not is_in_table(fields):
            return fields


def is_in_table(fields: Fields) -> bool:
    """Return whether a row refuses some choices."""
    try:
        changed(BASE, fields)
    except combinations.CombinationError:
        return True
    except ValueError:
        return False
    return False
