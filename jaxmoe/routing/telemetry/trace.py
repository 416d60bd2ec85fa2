# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes routing traces: the experts of every token in every MoE layer.

The file is a compressed .npz (`numpy.load` opens it):

    token_ids    [T] i32          id of each token in the vocabulary
    expert_ids   [L T K]          experts; E marks an empty slot; u8, or u16 from E = 256 on
    counts       [L E] i64        assignments per expert in `expert_ids`, for other readers
    num_experts  [] i64           E

for tokens without padding, in the order of the held-out text: L T K (or 2 L T K) + 4 T bytes before
compression. Counts:

    loads[l, e]       = number of tokens with expert e in layer l
    affinity[l, a, b] = number of pairs (slot of layer l, slot of layer l + 1) of one token with
                        experts a and b; for K = 1 the tokens that go from a to b

Source of the affinity: ExFlow (arXiv 2401.08383); pairs of slots are this library's reading for
K > 1. `jaxmoe/run/measures.py` records traces. Token ids can be decoded into the
text.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import zipfile

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Experts of every token in every MoE layer.

    Raises:
        ValueError: An expert id is outside 0 to E.
    """

    token_ids: Int[np.ndarray, " T"]
    expert_ids: Int[np.ndarray, "L T K"]
    """Expert of each slot; E marks an empty one."""
    num_experts: int
    """E: number of experts."""

    def __post_init__(self):
        if self.expert_ids.size and not (
            self.expert_ids.min() >= 0 and self.expert_ids.max() <= self.num_experts
        ):
            raise ValueError(
                f"trace: expert ids lie in {self.expert_ids.min()} to {self.expert_ids.max()}, and"
                f" must in 0 to {self.num_experts}, where {self.num_experts} means none"
            )

    @property
    def num_layers(self) -> int:
        """L: number of MoE layers."""
        return self.expert_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """T: number of tokens."""
        return self.expert_ids.shape[1]

    def part(self, first: int, last: int) -> RoutingTrace:
        """Return the trace of the tokens from `first` to before `last`."""
        ids = self.expert_ids[:, first:last]
        return dataclasses.replace(self, token_ids=self.token_ids[first:last], expert_ids=ids)

    def loads(self) -> Int[np.ndarray, "L E"]:
        """Return the assignments per layer and expert."""
        shape = (self.num_layers, self.num_experts + 1)
        flat = self.expert_ids.reshape(self.num_layers, -1)
        return np.stack([np.bincount(layer, minlength=shape[1]) for layer in flat])[:, :-1]

    def affinity(self) -> Int[np.ndarray, "M E E"]:
        """Return the pairs of slots between adjacent MoE layers, M = L - 1; see the module."""
        number = self.num_experts + 1
        pairs = []
        for experts, next_experts in zip(self.expert_ids[:-1], self.expert_ids[1:], strict=True):
            both = experts[:, :, None].astype(np.int64) * number + next_experts[:, None, :]
            table = np.bincount(both.ravel(), minlength=number**2).reshape(number, number)
            pairs.append(table[:-1, :-1])
        empty = np.zeros((0, self.num_experts, self.num_experts), np.int64)
        return np.stack(pairs) if pairs else empty

    def by_token(self, layer: int, vocab_size: int) -> Int[np.ndarray, "V E"]:
        """Return the assignments of each token id to each expert of a layer.

        Args:
            layer: Index among the MoE layers.
            vocab_size: V, above every id of the trace.
        """
        number = self.num_experts + 1
        pairs = self.token_ids[:, None].astype(np.int64) * number + self.expert_ids[layer]
        table = np.bincount(pairs.ravel(), minlength=vocab_size * number)
        return table.reshape(vocab_size, number)[:, :-1]

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return int(self.token_ids.max(initial=-1)) + 1


def save_trace(path: str | os.PathLike[str], trace: RoutingTrace) -> None:
    """Write a trace, and create its directory.

    Args:
        path: Path that ends in .npz.
        trace: Trace to write.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    narrow = np.uint8 if trace.num_experts < 256 else np.uint16
    np.savez_compressed(
        path,
        token_ids=trace.token_ids.astype(np.int32),
        expert_ids=trace.expert_ids.astype(narrow),
        counts=trace.loads(),
        num_experts=np.int64(trace.num_experts),
    )


def load_trace(path: str | os.PathLike[str]) -> RoutingTrace:
    """Return the trace in a file.

    Args:
        path: Path of a file from `save_trace`.

    Raises:
        ValueError: The file does not exist or is not a trace.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            parts = {name: file[name] for name in ("token_ids", "expert_ids", "num_experts")}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is not a routing trace ({error}): write one with jaxmoe routers --trace METHOD"
        ) from error
    token_ids = parts["token_ids"]
    expert_ids = parts["expert_ids"].astype(np.int32)
    if expert_ids.shape[1:2] != token_ids.shape:
        raise ValueError(
            f"{path} is not a routing trace: token_ids {token_ids.shape} must be [T], and"
            f" expert_ids {expert_ids.shape} [L T K]"
        )
    return RoutingTrace(token_ids, expert_ids, int(parts["num_experts"]))
