# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Who attends to whose keys at every step of a ring, and what travels meanwhile. Plain Python.

At step s rank r has the keys and values of owner r - d*s (modulo N); d = +1 where keys go to the
next rank, -1 where they go to the previous one. Step 0 is a rank's attention to its own tokens.
What a rank sees of another owner's keys is one of these forms:

    halves     causal, tokens laid out as [low pieces | high pieces] of a zigzag. High queries see
               all low keys; of an earlier owner low queries see low keys, of a later one high
               queries see high keys. Two half blocks at every rank and step, and no mask.
    earlier    causal, contiguous: all keys of earlier owners, none of later ones.
    near       the same, with a window that ends `reach` owners back.
    all        not causal, or positions that nothing is known about: whole blocks.

A piece travels from one rank that needs it to the next, and nowhere else. Mostly that is a
neighbour; the first to need it may be farther away. Gradients take the same way, a step later, and
the last rank sends the sum straight home. With c tokens on each of N ranks, all ranks send

    share * (N-1) * N * c * M * (H + Hv) * bytes         share 3/4 halves, 1/2 earlier, 1 all

once in the forward pass, and in the backward pass once again and once more in float32: an owner's
own part of its gradient stays where it is, so that N - 1 hops suffice. With halves
these are 2 (N-1) permutes forward and 5 (N-1) - 1 backward: the last two come after all arithmetic,
the others travel beside a block. Sources: Ring Attention
(arXiv 2310.01889), zigzag (Llama 3, arXiv 2407.21783, section 3.3.2).

To add a form: its name in `Form`, what is seen in `_seen`.
"""

import dataclasses
import functools
from typing import Literal

import numpy as np

from pallas_kernels.array_types import Int

Form = Literal["halves", "earlier", "near", "all"]
Pairs = tuple[tuple[int, int], ...]

LOW, HIGH = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Queries and keys that meet at a step: the number of their piece, by rank."""

    q: tuple[int, ...]
    k: tuple[int | None, ...]
    """None where a rank sees nothing: what it computes is thrown away."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """Pieces on their way between ranks, (from, to)."""

    piece: int
    is_at_home: bool
    """Keys: the owner sends its own. Gradients: the owner receives them."""
    pairs: Pairs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a rank does with one owner's keys."""

    blocks: tuple[Block, ...]
    """As many at every step but the first (own tokens) and the last (nothing left to do)."""
    keys: tuple[Hop, ...]
    """They leave in this step and are there in the next."""
    gradients: tuple[Hop, ...]
    """In the backward pass; as they stand after the step before this."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One way round the ring, with its share of the heads."""

    direction: int
    """+1: keys go to the next rank, -1: to the previous one."""
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """All of it; hashable."""

    ranks: int
    pieces: int
    """In which a rank's tokens are cut: 2 for halves, else 1."""
    routes: tuple[Route, ...]
    """One, or two with half of the heads each."""

    @property
    def num_steps(self) -> int:
        """Steps with arithmetic, the first included."""
        return max(1, len(self.routes[0].steps) - 1)

    def owner(self, direction: int, step: int, rank: int) -> int:
        """Whose keys a rank has."""
        return (rank - direction * step) % self.ranks

    def num_permutes(self, backward: bool = False) -> int:
        """Collective permutes; keys and values travel as one array."""
        hops = [hop for route in self.routes for step in route.steps for hop in step.keys]
        if backward:
            hops += [hop for route in self.routes for step in route.steps for hop in step.gradients]
        return len(hops)

    def bytes_sent(
        self, tokens: int, heads: int, width: int, itemsize: int, backward: bool = False
    ) -> int:
        """Bytes of keys and values, and of their gradients in float32, that all ranks send.

        Args:
            tokens: on a rank, B * S / N.
            heads: of keys on a rank, M.
            width: of a key and a value together, H + Hv.
            itemsize: bytes of a number.
            backward: in the backward pass, not the forward one.
        """
        numbers = tokens * heads * width // (self.pieces * len(self.routes))

        def sent(hops: tuple[Hop, ...]) -> int:
            return numbers * sum(len(hop.pairs) for hop in hops)

        steps = [step for route in self.routes for step in route.steps]
        total = itemsize * sum(sent(step.keys) for step in steps)
        return total + (4 * sum(sent(step.gradients) for step in steps) if backward else 0)

    def work(
        self,
        order: Int[np.ndarray, " S"],
        segment_ids: Int[np.ndarray, " S"] | None = None,
        *,
        causal: bool = True,
        window: int | None = None,
    ) -> Int[np.ndarray, "ranks steps"]:
        """Scores of one head that every rank does not mask, at every step of the first route.

        Args:
            order: of `sequence_order`.
            segment_ids: of the tokens, in the order of the sequence.
            causal: a query sees no later key.
            window: and none that is so far away.
        """
        held = order.reshape(self.ranks, self.pieces, -1)

        def count(q: np.ndarray, k: np.ndarray) -> int:
            distance = q[:, None] - k[None, :]
            sees = np.ones(distance.shape, bool)
            if causal:
                sees &= distance >= 0
            if window is not None:
                sees &= np.abs(distance) < window
            if segment_ids is not None:
                sees &= segment_ids[q][:, None] == segment_ids[k][None, :]
            return int(sees.sum())

        route = self.routes[0]
        found = np.zeros((self.ranks, self.num_steps), np.int64)
        for rank in range(self.ranks):
            found[rank, 0] = count(held[rank].reshape(-1), held[rank].reshape(-1))
            for s in range(1, self.num_steps):
                owner = self.owner(route.direction, s, rank)
                for block in route.steps[s].blocks:
                    k = block.k[rank]
                    if k is not None:
                        found[rank, s] += count(held[rank, block.q[rank]], held[owner, k])
        return found


@functools.cache
def make_schedule(
    ranks: int, form: Form, *, directions: Literal["one", "both"] = "one", reach: int | None = None
) -> Schedule:
    """The schedule of a ring.

    Args:
        ranks: N.
        form: of what is seen.
        directions: whether half of the heads go the other way round.
        reach: for "near", how many owners back a query sees.
    """
    # Halves go backwards: then high keys are needed by neighbours first.
    first = -1 if form == "halves" else 1
    ways = (first,) if directions == "one" else (first, -first)
    routes = tuple(
        Route(direction=way, steps=_steps(ranks, form, way, ranks if reach is None else reach))
        for way in ways
    )
    return Schedule(ranks=ranks, pieces=2 if form == "halves" else 1, routes=routes)


def _seen(form: Form, rank: int, owner: int, reach: int) -> tuple[tuple[int, int | None], ...]:
    """Pieces of the rank's queries, and pieces of another owner's keys that they see."""
    if form == "halves":
        half = LOW if owner < rank else HIGH
        return (HIGH, LOW), (half, half)
    if form == "all":
        return ((LOW, LOW),)
    return ((LOW, LOW if rank - reach <= owner < rank else None),)


def _steps(ranks: int, form: Form, direction: int, reach: int) -> tuple[Step, ...]:
    everyone = range(ranks)
    blocks: list[tuple[Block, ...]] = [()]
    ways: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (owner, piece): [(step, rank), ...]
    for s in range(1, ranks):
        seen = [_seen(form, r, (r - direction * s) % ranks, reach) for r in everyone]
        by_block = zip(*seen, strict=True)
        blocks.append(
            tuple(Block(q=tuple(q for q, _ in one), k=tuple(k for _, k in one)) for one in by_block)
        )
        for r in everyone:
            for piece in {k for _, k in seen[r]} - {None}:
                assert piece is not None
                ways.setdefault(((r - direction * s) % ranks, piece), []).append((s, r))
    if not ways:
        return (Step(blocks=(), keys=(), gradients=()),)
    last = max(s for way in ways.values() for s, _ in way)
    keys: list[dict] = [{} for _ in range(last + 2)]
    gradients: list[dict] = [{} for _ in range(last + 2)]
    for (owner, piece), way in ways.items():
        before = (way[0][0] - 1, owner)
        for s, r in way:
            assert s == before[0] + 1, "a piece is needed at consecutive steps"
            is_first = r == way[0][1]
            keys[s - 1].setdefault((piece, is_first), []).append((before[1], r))
            if not is_first:
                gradients[s].setdefault((piece, False), []).append((before[1], r))
            before = (s, r)
        gradients[before[0] + 1].setdefault((piece, True), []).append((before[1], owner))

    def hops(found: dict) -> tuple[Hop, ...]:
        return tuple(
            Hop(piece=piece, is_at_home=is_at_home, pairs=tuple(sorted(pairs)))
            for (piece, is_at_home), pairs in sorted(found.items())
        )

    return tuple(
        Step(
            blocks=blocks[s] if s <= last else (), keys=hops(keys[s]), gradients=hops(gradients[s])
        )
        for s in range(last + 2)
    )
