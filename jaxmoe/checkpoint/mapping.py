# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Maps the arrays of a foreign or older checkpoint layout to the arrays of a target.

A rule is a dataclass: the names it reads, the name it makes, and how several pieces are merged.

    RULES = (
        Concatenate("rank{r}/layers/{i}/wq", "layers/{i}/attention/q", axis=1),
        ConcatenateParts("rank{r}/layers/{i}/w13", "layers/{i}/ffn/gate_up", axis=0, parts=2),
        Unpad("rank{r}/embedding", "embedding/weight", axis=0, size=50257),
        Replicated("rank{r}/norm", "final_norm/scale"),
        Drop("rank{r}/{rest...}"),
    )

In a name, `{i}` matches within one part of a path and `{rest...}` any number of parts. Names that
agree in the placeholders of the target are its pieces, ordered by the other placeholders, numbers
by value (rank2 before rank10).

Every name must match exactly one rule. Names without a rule, names with several and rules without a
name are one error that lists all of them. After DeepSpeed's universal checkpoints (arXiv
2406.18820, section 3).

Commands take rules as a Python file that defines `RULES` (`read_rules`).

To add a rule: `jaxmoe/checkpoint/mapping.py` (a subclass of `MappingRule` with `merge`).
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import runpy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxmoe.checkpoint.manifest import CheckpointError

Pieces = Sequence[np.ndarray]

_PLACEHOLDER = re.compile(r"\{(\w+)(\.\.\.)?\}")


@dataclasses.dataclass(frozen=True, slots=True)
class MappingRule:
    """Base of all rules."""

    source: str
    """Names that the rule reads, with placeholders."""
    target: str
    """Name that the rule makes, with placeholders of the source."""

    keeps_shape: ClassVar[bool] = True
    """Whether the merged array has the shape of its pieces."""

    def __post_init__(self):
        if unknown := set(_names(self.target)) - set(_names(self.source)):
            raise ValueError(f"{self}: the source has no placeholder {{{min(unknown)}}}")

    def merge(self, pieces: Pieces) -> np.ndarray:
        """Return the target's array: by default the one piece.

        Raises:
            ValueError: The pieces do not fit together.
        """
        return pieces[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Rename(MappingRule):
    """Another name for the same array."""


@dataclasses.dataclass(frozen=True, slots=True)
class Drop(MappingRule):
    """Arrays that the target does not need."""

    target: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated(MappingRule):
    """One of several pieces that are equal bit by bit."""

    def merge(self, pieces: Pieces) -> np.ndarray:
        """Return the first piece if the others equal it."""
        first = pieces[0]
        for piece in pieces[1:]:
            if piece.dtype != first.dtype or piece.shape != first.shape:
                raise ValueError("the pieces differ in shape or dtype")
            if piece.tobytes() != first.tobytes():
                raise ValueError("the pieces are not equal")
        return first


@dataclasses.dataclass(frozen=True, slots=True)
class Average(MappingRule):
    """Mean of the pieces, computed in float32."""

    def merge(self, pieces: Pieces) -> np.ndarray:
        """Return the mean, in the pieces' dtype."""
        if len({piece.shape for piece in pieces}) > 1:
            raise ValueError("the pieces differ in shape")
        mean = sum(piece.astype(np.float32) for piece in pieces) / np.float32(len(pieces))
        return np.asarray(mean).astype(pieces[0].dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Concatenate(MappingRule):
    """Pieces one after another along an axis."""

    keeps_shape: ClassVar[bool] = False

    axis: int
    """Axis of the pieces."""

    def merge(self, pieces: Pieces) -> np.ndarray:
        """Return the pieces joined along the axis."""
        return np.concatenate(pieces, self.axis)


@dataclasses.dataclass(frozen=True, slots=True)
class ConcatenateParts(MappingRule):
    """Pieces of several fused matrices (QKV, SwiGLU): all first parts, then all second parts."""

    keeps_shape: ClassVar[bool] = False

    axis: int
    """Axis of the pieces."""
    parts: int
    """Matrices in one piece, one after another along the axis."""

    def merge(self, pieces: Pieces) -> np.ndarray:
        """Return the parts joined along the axis, grouped by their number."""
        cut = [np.split(piece, self.parts, self.axis) for piece in pieces]
        return np.concatenate(
            [part for group in zip(*cut, strict=True) for part in group], self.axis
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Unpad(MappingRule):
    """Pieces one after another along an axis, cut to a size."""

    keeps_shape: ClassVar[bool] = False

    axis: int
    """Axis of the pieces."""
    size: int
    """Entries that are kept, from the first."""

    def merge(self, pieces: Pieces) -> np.ndarray:
        """Return the pieces joined along the axis, without the end."""
        array = np.concatenate(pieces, self.axis)
        if array.shape[self.axis] < self.size:
            have = array.shape[self.axis]
            raise ValueError(f"axis {self.axis} has {have}, of which {self.size} cannot be kept")
        return np.take(array, np.arange(self.size), self.axis)


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """The sources of one target array."""

    rule: MappingRule
    sources: tuple[str, ...]
    """Names of the pieces, in order."""

    @property
    def is_renamed(self) -> bool:
        """Whether the array is one piece as it is, which need not be read to the host."""
        return isinstance(self.rule, Rename)

    def build(self, read: Callable[[str], Any], target: str) -> np.ndarray:
        """Return the array; pieces are read one by one.

        Args:
            read: Function from a name in the source to an array.
            target: Name of the array, for messages.

        Raises:
            CheckpointError: The pieces do not fit together.
        """
        pieces = [np.asarray(read(name)) for name in self.sources]
        try:
            return self.rule.merge(pieces)
        except ValueError as error:
            shapes = ", ".join(
                f"{name} {list(piece.shape)}"
                for name, piece in zip(self.sources, pieces, strict=True)
            )
            raise CheckpointError(f"{target}, by {self.rule}: {error}: {shapes}") from error


def read_rules(path: str, field: str) -> tuple[MappingRule, ...]:
    """Return the rules that a Python file defines. The file is executed.

    Args:
        path: File that assigns rules of this module to `RULES`.
        field: Config field that names the file, for messages.

    Raises:
        ValueError: The file cannot be read, is not Python, or defines no rules.
    """
    file = pathlib.Path(path).expanduser()
    way_out = (
        "give a Python file with RULES = (Rename(source, target), ...), rules of"
        " jaxmoe.checkpoint.mapping"
    )
    try:
        rules = runpy.run_path(str(file)).get("RULES")
    except OSError as error:
        raise ValueError(f"{field}={path} cannot be read ({error.strerror}): {way_out}") from error
    except (SyntaxError, NameError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{field}={path} cannot be run ({error}): {way_out}") from error
    if not isinstance(rules, tuple | list) or not all(
        isinstance(rule, MappingRule) for rule in rules
    ):
        raise ValueError(f"{field}={path} defines no RULES: {way_out}")
    return tuple(rules)


def plan_mapping(rules: Sequence[MappingRule], names: Iterable[str]) -> dict[str, Merged]:
    """Find the sources of every target array.

    Args:
        rules: Rules, of which exactly one must match each name.
        names: Names of all arrays of the source.

    Returns:
        Sources by target name.

    Raises:
        CheckpointError: A name without a rule or with several, or a rule that matches no name; the
            message lists all of them.
    """
    compiled = [(rule, re.compile(_pattern(rule.source))) for rule in rules]
    sources: dict[tuple[str, MappingRule], list[tuple[Any, str]]] = {}
    lines = []
    needed = set()
    for name in sorted(names):
        fitting = [(rule, m) for rule, pattern in compiled if (m := pattern.fullmatch(name))]
        needed |= {rule for rule, _ in fitting}
        if len(fitting) != 1:
            rule_names = " and ".join(str(rule) for rule, _ in fitting)
            lines.append(f"{name}: {f'matches {rule_names}' if fitting else 'matches no rule'}")
            continue
        rule, match = fitting[0]
        if not isinstance(rule, Drop):
            key = (_fill(rule.target, match), rule)
            sources.setdefault(key, []).append((_order(match, rule), name))
    lines += [f"{rule} matches nothing" for rule in rules if rule not in needed]
    made: dict[str, Merged] = {}
    for (target, rule), pieces in sources.items():
        if target in made:
            lines.append(f"{target}: made by {rule} and by {made[target].rule}")
        if isinstance(rule, Rename) and len(pieces) > 1:
            several = ", ".join(name for _, name in pieces[:3])
            lines.append(
                f"{target}: has {len(pieces)} pieces ({several}), which Rename cannot merge"
            )
        made[target] = Merged(rule, tuple(name for _, name in sorted(pieces)))
    if lines:
        shown = "\n  ".join(lines[:20]) + ("\n  ..." if len(lines) > 20 else "")
        raise CheckpointError(f"the mapping does not fit ({len(lines)} places):\n  {shown}")
    return made


def _pattern(source: str) -> str:
    """Return a regular expression; a repeated placeholder must match the same text."""
    parts = []
    seen = set()
    last = 0
    for match in _PLACEHOLDER.finditer(source):
        parts.append(re.escape(source[last : match.start()]))
        name = match[1]
        last = match.end()
        body = ".+" if match[2] else "[^/]+?"
        parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{body})")
        seen.add(name)
    return "".join([*parts, re.escape(source[last:])])


def _names(text: str) -> list[str]:
    return [match[1] for match in _PLACEHOLDER.finditer(text)]


def _fill(target: str, match: re.Match[str]) -> str:
    return _PLACEHOLDER.sub(lambda placeholder: match[placeholder[1]], target)


def _order(match: re.Match[str], rule: MappingRule) -> tuple[Any, ...]:
    """Return the sort key of a piece: numbers by value, before words."""
    names = [match[name] for name in _names(rule.source) if name not in _names(rule.target)]
    return tuple(
        (not part.isdigit(), int(part) if part.isdigit() else 0, part)
        for text in names
        for part in re.split(r"(\d+)", text)
    )
