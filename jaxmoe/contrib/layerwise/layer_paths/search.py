# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Searches a path for each sequence by Monte Carlo tree search.

A node is a path, the root runs every layer. A child skips one or two neighbouring layers of its
parent's, or repeats one. With reward exp(loss of the root - loss), N visits of a node and n of a
child of length k in a model of L layers, the search descends to the child with the largest

    mean reward + 1.8 sqrt(ln N / n) - 3 k / L

or with probability .1 to any, and adds a child where a node has at most sqrt(N) of them. Of all
paths tried whose loss is not above the root's, the best has the least loss + price k / L.

The constants are those of Dr.LLM (arXiv 2510.12773). There the reward is the correctness of an
answer; the loss in its place, the limit of children and the price are choices made here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.contrib.layerwise.layer_paths.rows import REPEAT, RUN, SKIP

_EXPLORATION = 1.8
_LENGTH_PENALTY = 3.0
_RANDOM = 0.1

Path = tuple[int, ...]
"""SKIP, RUN or REPEAT for each layer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """Search of a path for each sequence."""

    simulations: int = 50
    """Paths that are tried for each sequence."""
    budget: float = 2.0
    """Most layers that a path may run, as a multiple of the layers of the model."""
    price: float = 0.1
    """Nats per token that running all layers once costs; 0 takes the least loss, 100 the shortest
    path that is not worse."""
    seed: int = 0
    """Seed of the search."""

    def __post_init__(self):
        if self.simulations < 1:
            raise ValueError(f"search.simulations={self.simulations} must be at least 1")
        if not 1.0 <= self.budget <= 2.0:
            raise ValueError(
                f"search.budget={self.budget} must lie between 1 and 2: the path of all layers has"
                " 1, and one that runs each of them twice has 2"
            )
        if self.price < 0:
            raise ValueError(f"search.price={self.price} must be 0 or more")


class _Node:
    """A path, and what is known of it and its children."""

    def __init__(self, path: Path, actions: list[Path]):
        """Begin without visits.

        Args:
            path: Choice for each layer.
            actions: Paths that may become children, in random order.
        """
        self.path = path
        self.untried = actions
        self.children: list[_Node] = []
        self.visits = 0
        self.total = 0.0


class PathSearch:
    """The search tree of one sequence."""

    def __init__(self, num_layers: int, loss: float, config: SearchConfig, seed: int = 0):
        """Begin with the path that runs every layer.

        Args:
            num_layers: Layers that a token passes through.
            loss: Loss of that path.
            config: Constants of the search.
            seed: Number of the sequence, which the draws depend on.
        """
        self._config, self._rng = config, np.random.default_rng((config.seed, seed))
        self._layers = num_layers
        self._full = loss
        full = (RUN,) * num_layers
        self.losses: dict[Path, float] = {full: loss}
        self._root = self._node(full)
        self._visited = [self._root]
        self.learn(loss)

    def propose(self) -> Path:
        """Return the path to try next; `learn` must follow."""
        node = self._root
        self._visited = [self._root]
        while True:
            if node.untried and len(node.children) <= math.sqrt(node.visits):
                node.children.append(self._node(node.untried.pop()))
                node = node.children[-1]
                self._visited.append(node)
                return node.path
            if not node.children:
                return node.path
            node = self._descend(node)
            self._visited.append(node)

    def learn(self, loss: float) -> None:
        """Record the loss of the path that was proposed."""
        self.losses[self._visited[-1].path] = loss
        reward = math.exp(min(self._full - loss, 50.0))
        for node in self._visited:
            node.visits += 1
            node.total += reward

    def best(self) -> Path:
        """Return the best path that was tried: never worse than running every layer."""
        price = self._config.price / self._layers
        allowed = [path for path, loss in self.losses.items() if loss <= self._full]
        return min(allowed, key=lambda path: (self.losses[path] + price * sum(path), path))

    def _node(self, path: Path) -> _Node:
        actions = self._changes(path)
        order = self._rng.permutation(len(actions))
        return _Node(path, [actions[i] for i in order])

    def _changes(self, path: Path) -> list[Path]:
        """Return the paths with one more change, within the budget."""
        changes = [(place, (choice,)) for place in range(len(path)) for choice in (SKIP, REPEAT)]
        changes += [(place, (SKIP, SKIP)) for place in range(len(path) - 1)]
        paths = []
        for place, new in changes:
            end = place + len(new)
            changed = path[:place] + new + path[end:]
            is_allowed = sum(changed) <= self._config.budget * self._layers
            if is_allowed and set(path[place:end]) == {RUN}:
                paths.append(changed)
        return paths

    def _descend(self, node: _Node) -> _Node:
        if self._rng.random() < _RANDOM:
            return node.children[self._rng.integers(len(node.children))]

        def bound(child: _Node) -> float:
            spread = math.sqrt(math.log(node.visits) / child.visits)
            length = sum(child.path) / self._layers
            return child.total / child.visits + _EXPLORATION * spread - _LENGTH_PENALTY * length

        return max(node.children, key=bound)


def find_paths(
    losses_of: Callable[[Int[np.ndarray, "B layers"]], Float[np.ndarray, " B"]],
    shape: tuple[int, int],
    config: SearchConfig,
) -> Int[np.ndarray, "B layers"]:
    """Return the best path that was tried for each sequence; all are searched at once.

    Args:
        losses_of: Loss of each sequence along its path.
        shape: Number of sequences and of layers.
        config: Constants of the search.
    """
    full = losses_of(np.full(shape, RUN))
    searches = [PathSearch(shape[1], float(loss), config, row) for row, loss in enumerate(full)]
    for _ in range(config.simulations):
        paths = np.array([search.propose() for search in searches])
        for search, loss in zip(searches, losses_of(paths).tolist(), strict=True):
            search.learn(loss)
    return np.array([search.best() for search in searches])
