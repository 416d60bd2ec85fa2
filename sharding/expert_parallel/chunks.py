# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cost model for the number of chunks in which tokens go to their experts, and its optimum.

Each operation on n of something takes alpha + beta n seconds. Cut into r chunks, a layer takes

    g, a, x, s = alpha + beta / r      of all-gather, all-to-all, experts, reduce-scatter

per chunk, in the order of the seam: all-gather over `expert_tensor`, all-to-all over `expert`, the
experts, and back by all-to-all and reduce-scatter. Three queues run in parallel, each with one
operation at a time and in order: the links of `expert` (all chunks there, then all back), those of
`expert_tensor` (likewise), the compute units. Other traffic on the links of `expert`, in the
backward pass the gradients of other layers, takes G seconds and fills the gaps:

    seconds = max(2 r a + G,
                  g + 2 a + s + x + (r - 1) max(g, a, x, s),
                  g + 2 a + s + (r - 1) (max(g, a) + max(a, s)))

the longest paths through that graph: waiting at one queue, or at one queue there and one back. With
a single bottleneck it is one of the four cases of FSMoE (arXiv 2501.10714), which sends before it
gathers and has the same formulas:

    gradients        2 r a + G
    experts          2 a + g + s + r x
    all_to_all       2 r a + g + s
    expert_tensor    2 a + r (g + s)

The four cases are taken from citations of the paper; the graph and the general form are ours. Every
path is c + p r + q / r in the number of chunks, so their maximum has one minimum. Autodiff runs the
chunks of the forward pass backwards: r is one number for both, with experts of twice the time.

Memory, which more chunks save, is not modelled. The alpha of the experts includes reading their
weights again for each chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

Bottleneck = Literal["gradients", "experts", "all_to_all", "expert_tensor"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCost:
    """Cost of one operation: alpha + beta n seconds."""

    alpha: float
    """Seconds independent of the amount."""
    beta: float
    """Seconds for each byte, row or other unit of n."""

    def __post_init__(self):
        if self.alpha < 0 or self.beta < 0:
            raise ValueError(
                f"alpha={self.alpha} and beta={self.beta} are seconds and must not be negative:"
                " take those of fit_cost"
            )

    def of(self, amount: float) -> ChunkCost:
        """Return the cost of this amount, with n the fraction of it that is done at once.

        Args:
            amount: Amount in the unit of beta.
        """
        return ChunkCost(alpha=self.alpha, beta=self.beta * amount)

    def seconds(self, amount: float) -> float:
        """Return the seconds of one execution.

        Args:
            amount: n.
        """
        return self.alpha + self.beta * amount


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Costs of each operation of a MoE layer on all tokens of a device: n = 1."""

    all_to_all: ChunkCost
    """All-to-all, one way."""
    experts: ChunkCost
    """Experts, forward."""
    all_gather: ChunkCost = ChunkCost(alpha=0.0, beta=0.0)
    """All-gather over expert_tensor; none by default."""
    reduce_scatter: ChunkCost = ChunkCost(alpha=0.0, beta=0.0)
    """Reduce-scatter over expert_tensor; none by default."""


def fit_cost(amounts: Sequence[float], seconds: Sequence[float]) -> ChunkCost:
    """Return the line through measurements with the least relative error.

    Args:
        amounts: n of each measurement, at least two different ones.
        seconds: Time of each measurement.

    Returns:
        Cost with neither part negative: negative slopes and intercepts are noise.

    Raises:
        ValueError: Fewer than two amounts, or a time that is not positive.
    """
    n = np.asarray(amounts, np.float64)
    t = np.asarray(seconds, np.float64)
    if n.shape != t.shape or np.unique(n).size < 2 or (t <= 0).any() or (n < 0).any():
        raise ValueError(
            f"a cost needs times above 0 for at least two amounts, not {list(seconds)} for"
            f" {list(amounts)}: measure more sizes"
        )
    columns = np.stack([1 / t, n / t], 1)
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if alpha < 0 or beta < 0:  # the optimum is on one of the two borders
        ends = [(column @ np.ones_like(t)) / (column @ column) for column in columns.T]
        missed = [
            ((end * column - 1) ** 2).sum() for end, column in zip(ends, columns.T, strict=True)
        ]
        alpha, beta = (ends[0], 0.0) if missed[0] <= missed[1] else (0.0, ends[1])
    return ChunkCost(alpha=float(alpha), beta=float(beta))


def layer_seconds(costs: LayerCosts, num_chunks: int, gradients: float = 0.0) -> float:
    """Return the seconds of one pass through a layer.

    Args:
        costs: Costs of its operations.
        num_chunks: r.
        gradients: G, seconds of other traffic on the links of `expert`.
    """
    return max(_ways(costs, num_chunks, gradients).values())


def bottleneck(costs: LayerCosts, num_chunks: int, gradients: float = 0.0) -> Bottleneck:
    """Return the bottleneck of one pass through a layer.

    Args:
        costs: Costs of its operations.
        num_chunks: r.
        gradients: G, seconds of other traffic on the links of `expert`.
    """
    ways = _ways(costs, num_chunks, gradients)
    return max(ways, key=ways.__getitem__)


def _ways(costs: LayerCosts, num_chunks: int, gradients: float) -> dict[Bottleneck, float]:
    """Return the longest path through each queue, or pair of queues; ties go to the first."""
    r = num_chunks
    part = 1 / num_chunks
    g = costs.all_gather.seconds(part)
    a = costs.all_to_all.seconds(part)
    x = costs.experts.seconds(part)
    s = costs.reduce_scatter.seconds(part)
    once = g + 2 * a + s
    return {
        "experts": once + r * x,
        "all_to_all": once + max(x + (r - 1) * a, 2 * (r - 1) * a),
        "expert_tensor": once + max(x + (r - 1) * max(g, s), (r - 1) * (max(g, a) + max(a, s))),
        "gradients": 2 * r * a + gradients,
    }


def choose_num_chunks(
    costs: LayerCosts, num_tokens: int, *, gradients: float = 0.0, most: int = 64
) -> int:
    """Return the number of chunks with the fastest forward and backward pass; ties: the fewest.

    Args:
        costs: Costs of the operations of the forward pass.
        num_tokens: Tokens of a device; a multiple of the chunks.
        gradients: G of the backward pass.
        most: Largest number of chunks to consider.
    """
    twice = ChunkCost(alpha=2 * costs.experts.alpha, beta=2 * costs.experts.beta)
    backward = dataclasses.replace(
        costs,
        experts=twice,
        all_gather=costs.reduce_scatter,
        reduce_scatter=costs.all_gather,
    )

    def seconds(num_chunks: int) -> float:
        forward = layer_seconds(costs, num_chunks)
        return forward + layer_seconds(backward, num_chunks, gradients)

    divisors = (r for r in range(1, min(most, num_tokens) + 1) if num_tokens % r == 0)
    return min(divisors, key=seconds)
