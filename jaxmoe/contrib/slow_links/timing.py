# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""When workers exchange fragments of their parameters.

Fragment f of P is sent after step t where (t - o) mod H = 0 and t >= o, with the offset
o = floor((f + 1) H / P), and merged `delay` steps later. All fragments are sent once in H steps.

After the last step of a run every fragment is sent and merged at once, after what was under way: a
run ends with all that its workers have learnt, however H divides its steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTiming:
    """Period, fragments and delay of the exchanges."""

    every: int = 1
    """Steps between two exchanges of one fragment (H)."""
    fragments: int = 1
    """Parts of the parameters that are exchanged at different steps (P)."""
    delay: int = 0
    """Steps between sending a fragment and merging what came back."""
    keep: float = 0.0
    """Share of its own parameters that a worker keeps at a merge."""
    last: int | None = None
    """Last step of the run, after which every fragment is exchanged; None if there is none."""

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"replicas.every={self.every} must be at least 1 step")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"replicas.fragments={self.fragments} must be at least 1 and at most"
                f" replicas.every={self.every}: a step exchanges one fragment"
            )
        if not 0 <= self.delay <= self.every:
            raise ValueError(
                f"replicas.delay={self.delay} must be at least 0 and at most"
                f" replicas.every={self.every}: one message of a fragment is under way at a time"
            )
        if not 0.0 <= self.keep <= 1.0:
            raise ValueError(f"replicas.keep={self.keep} must lie in [0, 1]")

    def offset(self, fragment: int) -> int:
        """Return the first step after which a fragment is sent."""
        return (fragment + 1) * self.every // self.fragments

    def sends(self, fragment: int, step: Any) -> Any:
        """Return whether a fragment is sent after a step in its turn; steps may be traced."""
        offset = self.offset(fragment)
        return (step >= offset) & ((step - offset) % self.every == 0)

    def merges(self, fragment: int, step: Any) -> Any:
        """Return whether a fragment is merged after a step; steps may be traced."""
        return self.sends(fragment, step - self.delay)

    def sent(self, step: int) -> tuple[int, ...]:
        """Return the fragments that are sent after a step in their turn."""
        return tuple(part for part in range(self.fragments) if self.sends(part, step))

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """All that `sent` returns for the steps of a run: nothing, or a fragment; in this order."""
        steps = 2 * self.every if self.last is None else min(self.last, 2 * self.every)
        return tuple(sorted({self.sent(step) for step in range(steps)}))

    def ends(self, step: Any) -> Any:
        """Return whether a step is the last, after which all fragments are exchanged."""
        return False if self.last is None else step == self.last

    def is_under_way(self, fragment: int) -> bool:
        """Return whether a fragment that was sent is not yet merged after the last step."""
        last = self.last
        if last is None:
            return False
        return any(self.sends(fragment, step) for step in range(max(last - self.delay, 0), last))

    def round(self, fragment: int, step: Any) -> Any:
        """Return the number of exchanges of a fragment before one that is sent after a step."""
        return -((self.offset(fragment) - step) // self.every)

    def exchanges_a_step(self, fragment: int) -> float:
        """Return the number of exchanges of a fragment, as a mean over the steps of the run."""
        if self.last is None:
            return 1 / self.every
        return (max(self.round(fragment, self.last), 0) + 1) / self.last
