# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the routers of a trained run on held-out tokens, for `evaluate --routing detailed`.

    gamma_eff       congestion coefficient fitted to the loads, with a bootstrap interval
    token           mutual information of token and expert, nats
    domain          the same of domain and expert, normalized, where the data knows domains
    together        largest share of an expert's tokens that one other expert has as well
    window          max violation of all batches together

A domain is a language of the synthetic mixture; other data have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.contrib.telemetry.congestion import fit_congestion
from jaxmoe.contrib.telemetry.routing import coactivation, domain_information, mutual_information
from jaxmoe.data import Batch
from jaxmoe.data.synthetic import SyntheticSource
from jaxmoe.routing import RouterStatistics
from jaxmoe.routing.telemetry import load
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.measures import Details, router_statistics
from jaxmoe.training.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterDetails(Details):
    """One row of statistics per MoE layer on the held-out batches; none for a dense model."""

    name: ClassVar[str] = "routers"

    def rows(self, assembly: Assembly, state: TrainState) -> list[dict[str, Any]]:
        """Return a row for each MoE layer."""
        per_batch = _statistics(assembly, state, assembly.held_out())
        if not per_batch:
            return []
        summed = per_batch[0]
        for statistics in per_batch[1:]:
            summed = summed + statistics
        extra = summed.extra
        rows = []
        columns = {"token": mutual_information(summed)}
        if "detail_domains" in extra:
            columns["domain"] = domain_information(extra["detail_domains"])
        if "detail_coactivation" in extra:
            columns["together"] = coactivation(extra["detail_coactivation"])
        share = np.asarray(load(summed))
        for layer in range(share.shape[0]):
            row: dict[str, Any] = {"layer": layer}
            row |= {name: float(values[layer]) for name, values in columns.items()}
            row["window"] = float(share[layer].max() * share.shape[1] - 1.0)
            counts = np.stack([statistics.counts[layer] for statistics in per_batch])
            if "detail_log_prob" in extra and (counts.sum(-1) > 0).all():
                quality = np.stack(
                    [s.extra["detail_log_prob"][layer] / s.num_tokens[layer] for s in per_batch]
                )
                fit = fit_congestion(counts, quality)
                row |= {"gamma_eff": fit.gamma, "low": fit.low, "high": fit.high}
            rows.append(row)
        return rows


def _statistics(
    assembly: Assembly, state: TrainState, batches: Iterable[Batch]
) -> list[RouterStatistics]:
    """Return the detailed statistics of each batch, on the host."""
    model = assembly.plan.model
    source = assembly.source
    execution = dataclasses.replace(assembly.execution, telemetry="detailed")
    symbols = None
    if isinstance(source, SyntheticSource) and len(source.chains) > 1:
        symbols = jnp.int32(source.chains[0].transitions.shape[1])
    measured = [
        router_statistics(
            model,
            execution,
            state.params,
            state.router_state,
            batch,
            None if symbols is None else jnp.asarray(batch.tokens) // symbols,
        )
        for batch in batches
    ]
    return [jax.device_get(statistics) for statistics in measured if statistics is not None]
