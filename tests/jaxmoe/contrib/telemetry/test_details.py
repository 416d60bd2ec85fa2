# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What `evaluate --routing detailed` says of routers, on a mixture of languages."""

import dataclasses

import jax
import numpy as np

from experiments.doctor.devices import tiny_config
from experiments.evaluate import format_router_details
from jaxmoe.contrib.telemetry.details import RouterDetails
from jaxmoe.data import LanguageMixtureConfig
from jaxmoe.run.assemble import assemble


def test_a_row_for_each_layer():
    data = LanguageMixtureConfig(num_languages=2, symbols_per_language=4)
    config = dataclasses.replace(tiny_config(len(jax.devices())), data=data)
    model = dataclasses.replace(config.model, vocab_size=8)
    evaluation = dataclasses.replace(config.evaluation, batches=3)
    config = dataclasses.replace(config, model=model, evaluation=evaluation)
    assembly = assemble(config)
    with jax.set_mesh(assembly.mesh):
        rows = RouterDetails().rows(assembly, assembly.new_state())
    assert [row["layer"] for row in rows] == list(range(model.num_moe_layers))
    for row in rows:
        assert set(row) == {
            "layer",
            "token",
            "domain",
            "together",
            "window",
            "gamma_eff",
            "low",
            "high",
        }
        assert all(np.isfinite(value) for value in row.values())
        assert row["token"] >= 0.0 and 0.0 <= row["domain"] <= 1.0 and row["window"] >= 0.0
        assert row["low"] <= row["gamma_eff"] * (1 + 1e-6) and row["high"] >= row["low"]
    assert format_router_details(rows).count("\n") == len(rows)
    assert "no router" in format_router_details([])
