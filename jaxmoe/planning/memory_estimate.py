# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes on one device in a train step, by category, and the phases in which they are held.

`jaxmoe/planning/memory.py` computes them, and says what each phase holds.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters: int
    optimizer: int
    """Optimiser state on the device: only counters if it is kept in the host's memory."""
    batch: int
    other_state: int
    """Router state, counters and key."""
    gradients: float
    """Float32 gradients of the whole step."""
    copies: float
    """Sharded parameters in the dtype of products."""
    saved: float
    """Activations kept for the backward pass."""
    masks: float
    """Masks of attention without a kernel."""
    layer: float
    """Working set of one layer's backward pass without its experts."""
    experts: float
    """Gathered expert weights, their gradients and the experts' rows, for one layer."""
    logits: float
    """Logits of one chunk, the head's matrix and its gradient."""
    embedding: float
    """Gathered embedding table and its gradient."""
    update: float
    """Directions of the optimiser and matrices brought together whole."""
    arriving: float = 0.0
    """Layers on the device whose parameters, or gradients, lie in host memory."""
    streams: float = 0.0
    """Inputs of groups of layers and gradients of streams that a pipeline keeps."""
    before: float = 0.0
    """Activations and working set of the layers before the stages of a pipeline."""
    after: float = 0.0
    """The same of the layers after the stages."""
    host: float = 0.0
    """Bytes in host memory, for one device; no part of `total`."""
    disk: float = 0.0
    """Bytes of the optimiser state in files, for one device; no part of `total`."""

    @property
    def arguments(self) -> int:
        """Arguments of the compiled step; exact."""
        return self.parameters + self.optimizer + self.batch + self.other_state

    @property
    def phases(self) -> dict[str, float]:
        """Temporaries in each phase of the step."""
        resident = self.gradients + self.copies + self.streams
        # A pipeline has the activations of a group in its backward pass alone.
        saved = self.after if self.streams else self.saved + self.masks
        return {
            "layers": resident
            + self.arriving
            + self.saved
            + self.masks
            + self.layer
            + self.experts,
            "head": resident + saved + self.logits,
            "embedding": resident + self.embedding + self.before,
            "update": self.gradients + self.update,
        }

    @property
    def temporaries(self) -> float:
        """Temporaries of the compiled step; approximate."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Phase with the largest temporaries."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def total(self) -> float:
        """Bytes of the whole step; its few results beside the state are not counted."""
        return self.arguments + self.temporaries

    def categories(self) -> dict[str, float]:
        """Return the bytes held in the peak phase by name; they add up to `total`."""
        state = {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "batch and counters": self.batch + self.other_state,
            "gradients": self.gradients,
        }
        copies = {"parameters for products": self.copies}
        saved = {"saved activations": self.saved, "attention masks": self.masks}
        before, after = {}, saved
        if self.streams:
            copies |= {"streams of the pipeline": self.streams}
            before = {"layers before the stages": self.before}
            after = {"layers after the stages": self.after}
        match self.peak_phase:
            case "layers":
                arriving = {"layers from host memory": self.arriving} if self.arriving else {}
                arriving |= {"experts": self.experts, "one layer": self.layer}
                return state | copies | saved | arriving
            case "head":
                return state | copies | after | {"logits and head": self.logits}
            case "embedding":
                return state | copies | before | {"embedding": self.embedding}
            case _:
                return state | {"update": self.update}
