# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The summary of a run names the kernels that run for the shapes of its model."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from experiments import recipes
from experiments.doctor import devices
from jaxmoe.data import MarkovConfig
from jaxmoe.data.loader import Loader
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.precision import PrecisionPolicy
from jaxmoe.run.assemble import assemble
from jaxmoe.run.reporting import summary
from jaxmoe.run.reporting.summary import implementations
from tests.support import gpus

pytestmark = gpus.triton_may_go

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "cuda")


def assembly_of(*, width=128, window=None, softcap=None):
    """A run of one dense layer."""
    given = recipes.markov(steps=2, batch_size=8, sequence_length=256)
    attention = AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=width, window=window, softcap=softcap
    )
    config = dataclasses.replace(
        given,
        model=ModelConfig(
            vocab_size=8, num_layers=1, embed_dim=32, moe=None, dense_dim=32, attention=attention
        ),
        data=MarkovConfig(),
        execution=dataclasses.replace(
            given.execution, precision=PrecisionPolicy(compute="bfloat16")
        ),
    )
    return assemble(config, trains=True)


def described(mesh):
    """The mesh, of H100s."""
    return AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=H100
    )


def with_documents(batch):
    """A loader's method, of rows of several documents each."""

    def packed(self, *given, **named):
        rows = batch(self, *given, **named)
        documents = 1 + np.arange(rows.tokens.shape[1]) // 100
        ids = np.broadcast_to(documents, rows.tokens.shape).astype(np.int32)
        return dataclasses.replace(rows, segment_ids=ids)

    return packed


@pytest.mark.parametrize(
    ("fields", "has_documents", "kernel"),
    [
        ({}, False, "cudnn"),
        ({"window": 70}, False, "cudnn"),
        ({"softcap": 30.0}, False, "pallas_gpu"),
        ({"width": 96}, False, "pallas_gpu"),
        ({}, True, "pallas_gpu"),
    ],
    ids=["whole sequences", "window", "softcap", "other heads", "documents"],
)
def test_the_summary_names_the_attention_that_runs(fields, has_documents, kernel, monkeypatch):
    if has_documents:
        monkeypatch.setattr(Loader, "batch", with_documents(Loader.batch))
    assembly = assembly_of(**fields)
    found = implementations(assembly, described(assembly.mesh.abstract_mesh))
    assert found["flash_attention"] == kernel
    assert implementations(assembly)["flash_attention"] == "xla"


def test_doctor_names_the_cases_that_a_kernel_runs(monkeypatch):
    monkeypatch.setattr(devices, "prove", lambda scales: [])
    (attention,) = [one.text for one in devices.kernels() if "flash_attention" in one.text]
    assert attention.startswith("flash_attention: xla, ")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        said = [one.text for one in devices.kernels() if one.text.startswith("flash_attention")]
    kernels = [text.partition(", ")[0] for text in said if text.startswith("flash_attention for d")]
    kernels += [text.rpartition(": cudnn, ")[0] for text in said if ": cudnn, " in text]
    assert kernels == [
        "flash_attention for documents: pallas_gpu",
        "flash_attention for whole, window, wide heads",
    ]


def test_a_summary_is_written_where_the_program_cannot_be_traced(monkeypatch, caplog):
    def refuse(*_, **__):
        raise ValueError("no such program")

    monkeypatch.setattr(summary, "make_eval_step", refuse)
    assembly = assembly_of()
    found = implementations(assembly, described(assembly.mesh.abstract_mesh))
    assert found["flash_attention"] == "pallas_gpu"
    assert "kernels are named without the shapes of the model: no such program" in caplog.text
