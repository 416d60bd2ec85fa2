# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans which keys a rank attends to at every step of a ring, and what travels meanwhile.

Plain Python, without arrays. At step s rank r has the keys and values of owner r - d*s (modulo N);
d = +1 where keys go to the next rank, -1 where they go to the previous one. Step 0 is a rank's
attention to its own tokens. A form defines which keys of another owner a rank sees:

    halves     causal, tokens laid out as [low pieces | high pieces] of a zigzag. High queries see
               all low keys; of an earlier owner low queries see low keys, of a later one high
               queries see high keys. Two half blocks at every rank and step, and no mask.
    earlier    causal, contiguous: all keys of earlier owners, none of later ones.
    near       the same, with a window that ends `reach` owners back.
    all        not causal, or unknown positions: whole blocks.

A piece travels from one rank that needs it to the next, and nowhere else. Usually that is a
neighbour; the first rank to need it may be farther away. Gradients take the same route a step
later, and the last rank sends the sum straight home. With c tokens on each of N ranks, all ranks
send

    share * (N-1) * N * c * M * (H + Hv) * bytes         share 3/4 halves, 1/2 earlier, 1 all

once in the forward pass, and in the backward pass once again and once more in float32: an owner's
own part of its gradient stays where it is, so that N - 1 hops suffice. With halves these are
2 (N-1) permutes forward and 5 (N-1) - 1 backward: the last two come after all arithmetic, the
others travel beside a block. Sources: Ring Attention (arXiv 2310.01889), zigzag (Llama 3,
arXiv 2407.21783, section 3.3.2).
"""

import dataclasses
import functools
from typing import Literal

Form = Literal["halves", "earlier", "near", "all"]
Pairs = tuple[tuple[int, int], ...]

LOW = 0
HIGH = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockPair:
    """Queries and keys that meet at a step: their piece numbers, by rank."""

    q: tuple[int, ...]
    k: tuple[int | None, ...]
    """None where a rank sees nothing; its result is discarded."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """Transfer of a piece between pairs of ranks (from, to)."""

    piece: int
    is_at_home: bool
    """Whether the owner sends its own keys, or receives its own gradients."""
    pairs: Pairs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """Blocks and transfers of one step."""

    blocks: tuple[BlockPair, ...]
    """Blocks to compute; none at the first step (own tokens) and after the last."""
    keys: tuple[Hop, ...]
    """Transfers of keys, which arrive before the next step."""
    gradients: tuple[Hop, ...]
    """Transfers of gradients in the backward pass, summed up to the step before this."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HopRoute:
    """One direction around the ring, with its share of the heads."""

    direction: int
    """+1 where keys go to the next rank, -1 where they go to the previous one."""
    steps: tuple[RingStep, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingSchedule:
    """Complete schedule of a ring; hashable."""

    ranks: int
    pieces: int
    """Number of pieces of a rank's tokens: 2 for halves, else 1."""
    routes: tuple[HopRoute, ...]
    """One route, or two with half of the heads each."""

    @property
    def num_steps(self) -> int:
        """Number of steps with arithmetic, the first included."""
        return max(1, len(self.routes[0].steps) - 1)

    def owner(self, direction: int, step: int, rank: int) -> int:
        """Return the rank whose keys a rank holds."""
        return (rank - direction * step) % self.ranks


@functools.cache
def make_schedule(
    ranks: int, form: Form, *, directions: Literal["one", "both"] = "one", reach: int | None = None
) -> RingSchedule:
    """Return the schedule of a ring.

    Args:
        ranks: Number of ranks.
        form: Form of what ranks see of each other.
        directions: "both" sends half of the heads the other way round.
        reach: Number of owners back that a query sees, for "near".
    """
    # Halves go backwards: then high keys are needed by neighbours first.
    first = -1 if form == "halves" else 1
    ways = (first,) if directions == "one" else (first, -first)
    routes = tuple(
        HopRoute(direction=way, steps=_steps(ranks, form, way, ranks if reach is None else reach))
        for way in ways
    )
    return RingSchedule(ranks=ranks, pieces=2 if form == "halves" else 1, routes=routes)


def _seen(form: Form, rank: int, owner: int, reach: int) -> tuple[tuple[int, int | None], ...]:
    """Return pairs of a piece of the rank's queries and the piece of keys that it sees."""
    if form == "halves":
        half = LOW if owner < rank else HIGH
        return (HIGH, LOW), (half, half)
    if form == "all":
        return ((LOW, LOW),)
    return ((LOW, LOW if rank - reach <= owner < rank else None),)


def _steps(ranks: int, form: Form, direction: int, reach: int) -> tuple[RingStep, ...]:
    all_ranks = range(ranks)
    blocks: list[tuple[BlockPair, ...]] = [()]
    ways: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (owner, piece): [(step, rank), ...]
    for s in range(1, ranks):
        seen = [_seen(form, r, (r - direction * s) % ranks, reach) for r in all_ranks]
        by_block = zip(*seen, strict=True)
        blocks.append(
            tuple(
                BlockPair(q=tuple(q for q, _ in block_pairs), k=tuple(k for _, k in block_pairs))
                for block_pairs in by_block
            )
        )
        for r in all_ranks:
            for piece in {k for _, k in seen[r]} - {None}:
                assert piece is not None
                ways.setdefault(((r - direction * s) % ranks, piece), []).append((s, r))
    if not ways:
        return (RingStep(blocks=(), keys=(), gradients=()),)
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

    def hops(pairs_by_piece: dict) -> tuple[Hop, ...]:
        return tuple(
            Hop(piece=piece, is_at_home=is_at_home, pairs=tuple(sorted(pairs)))
            for (piece, is_at_home), pairs in sorted(pairs_by_piece.items())
        )

    return tuple(
        RingStep(
            blocks=blocks[s] if s <= last else (), keys=hops(keys[s]), gradients=hops(gradients[s])
        )
        for s in range(last + 2)
    )
