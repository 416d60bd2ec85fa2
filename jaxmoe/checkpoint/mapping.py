# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Renames and merges: the arrays of a foreign or older layout as the arrays that are wanted.

A rule is a line of text: where an array comes from, what it is called here, how pieces are merged.

    rank{r}/layers/{i}/wq -> layers/{i}/attention/q : concatenate 1
    rank{r}/layers/{i}/w13 -> layers/{i}/ffn/gate_up : parts 0 of 2
    rank{r}/embedding -> embedding/weight : unpadded 0 to 50257
    rank{r}/norm -> final_norm/scale : replicated
    rank{r}/{rest...} -> : dropped

    {name}      matches within one part of a path, {name...} any number of parts
    pieces      what agrees in the placeholders of the target; in the order of the others, numbers
                by value: rank2 before rank10

    (nothing)         one piece, as it is
    replicated        all pieces are equal, bit by bit, and one of them is taken
    average           the mean of the pieces, in float32
    concatenate A     along axis A
    parts A of P      each piece holds P parts one behind the other along axis A (a fused QKV or
                      SwiGLU): all of the first part, then all of the second
    unpadded A to N   concatenated along axis A, of which the first N are kept
    dropped           not wanted

Every name must match exactly one rule: what is left over, or meant twice, is an error that lists
all of it. After DeepSpeed's universal checkpoints (arXiv 2406.18820, section 3).

To add a merge: a function in `_MERGES`, a line above.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.configs import closest

Pieces = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MappingRule:
    """One line of a mapping."""

    source: str
    """Names it takes, with placeholders."""
    target: str
    """What they become; empty where they are dropped."""
    merge: str = ""
    """How pieces become one, as in the text above."""

    def __str__(self) -> str:
        merge = f" : {self.merge}" if self.merge else ""
        return f"{self.source} -> {self.target}{merge}"


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """Where one wanted array comes from."""

    rule: MappingRule
    sources: tuple[str, ...]
    """In order."""

    def build(self, read: Callable[[str], Any], target: str) -> np.ndarray:
        """The array; its pieces are read one by one.

        Args:
            read: an array by its name in the source.
            target: its name here, for messages.

        Raises:
            CheckpointError: the pieces do not go together.
        """
        pieces = [np.asarray(read(name)) for name in self.sources]
        try:
            return _merge_of(self.rule)(pieces)
        except ValueError as error:
            shapes = ", ".join(
                f"{name} {list(piece.shape)}"
                for name, piece in zip(self.sources, pieces, strict=True)
            )
            raise CheckpointError(
                f"{target}, by the rule '{self.rule}': {error}: {shapes}"
            ) from error


def parse_mapping(text: str) -> tuple[MappingRule, ...]:
    """The rules of a text, a line each; empty lines and what follows # say nothing.

    Raises:
        CheckpointError: a line that is no rule; with its number.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s*->\s*([^\s:]*)\s*(?::\s*(.*))?", line)
        if match is None:
            raise CheckpointError(
                f"line {number} of the mapping is no rule: {line!r}; write source -> target, or"
                " source -> target : merge"
            )
        rule = MappingRule(
            source=match[1], target=match[2], merge=" ".join((match[3] or "").split())
        )
        try:
            _check(rule)
        except ValueError as error:
            raise CheckpointError(f"line {number} of the mapping, '{rule}': {error}") from error
        rules.append(rule)
    return tuple(rules)


def plan_mapping(rules: Sequence[MappingRule], names: Iterable[str]) -> dict[str, Merged]:
    """Which names make which wanted array.

    Args:
        rules: from `parse_mapping`.
        names: of all arrays of the source.

    Returns:
        Wanted names, with their sources.

    Raises:
        CheckpointError: a name without a rule, with several, or a rule that no name needed; all of
            them at once.
    """
    compiled = [(rule, re.compile(_pattern(rule.source))) for rule in rules]
    found: dict[tuple[str, MappingRule], list[tuple[Any, str]]] = {}
    lines, needed = [], set()
    for name in sorted(names):
        fitting = [(rule, m) for rule, pattern in compiled if (m := pattern.fullmatch(name))]
        needed |= {rule for rule, _ in fitting}
        if len(fitting) != 1:
            both = " and ".join(f"'{rule}'" for rule, _ in fitting)
            lines.append(f"{name}: {f'matches {both}' if fitting else 'matches no rule'}")
            continue
        rule, match = fitting[0]
        if rule.merge != "dropped":
            key = (_filled(rule.target, match), rule)
            found.setdefault(key, []).append((_order(match, rule), name))
    lines += [f"the rule '{rule}' matches nothing" for rule in rules if rule not in needed]
    made: dict[str, Merged] = {}
    for (target, rule), pieces in found.items():
        if target in made:
            lines.append(f"{target}: made by '{rule}' and by '{made[target].rule}'")
        if not rule.merge and len(pieces) > 1:
            several = ", ".join(name for _, name in pieces[:3])
            lines.append(f"{target}: has {len(pieces)} pieces ({several}) and no merge")
        made[target] = Merged(rule, tuple(name for _, name in sorted(pieces)))
    if lines:
        shown = "\n  ".join(lines[:20]) + ("\n  ..." if len(lines) > 20 else "")
        raise CheckpointError(f"the mapping does not fit ({len(lines)} places):\n  {shown}")
    return made


_PLACEHOLDER = re.compile(r"\{(\w+)(\.\.\.)?\}")


def _pattern(source: str) -> str:
    """A regular expression; a placeholder that comes again must match the same."""
    parts, seen, last = [], set(), 0
    for match in _PLACEHOLDER.finditer(source):
        parts.append(re.escape(source[last : match.start()]))
        name, last = match[1], match.end()
        body = ".+" if match[2] else "[^/]+?"
        parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{body})")
        seen.add(name)
    return "".join([*parts, re.escape(source[last:])])


def _names(text: str) -> list[str]:
    return [match[1] for match in _PLACEHOLDER.finditer(text)]


def _filled(target: str, match: re.Match[str]) -> str:
    return _PLACEHOLDER.sub(lambda placeholder: match[placeholder[1]], target)


def _order(match: re.Match[str], rule: MappingRule) -> tuple[Any, ...]:
    """Where a piece stands among the others: numbers by value, before words."""
    own = [match[name] for name in _names(rule.source) if name not in _names(rule.target)]
    return tuple(
        (not part.isdigit(), int(part) if part.isdigit() else 0, part)
        for text in own
        for part in re.split(r"(\d+)", text)
    )


def _check(rule: MappingRule) -> None:
    unknown = set(_names(rule.target)) - set(_names(rule.source))
    if unknown:
        raise ValueError(f"the target has {{{min(unknown)}}}, which the source has not")
    if (rule.merge == "dropped") != (not rule.target):
        raise ValueError("what is dropped has no target, and everything else has one")
    _merge_of(rule)


def _merge_of(rule: MappingRule) -> Callable[[Pieces], np.ndarray]:
    for pattern, merge in _MERGES.items():
        match = re.fullmatch(pattern, rule.merge)
        if match is not None:
            numbers = [int(number) for number in match.groups()]
            return lambda pieces: merge(pieces, *numbers)
    words = ("replicated", "average", "concatenate", "parts", "unpadded", "dropped")
    near = closest(rule.merge.partition(" ")[0], words) or ":"
    raise ValueError(f"{rule.merge!r} is no merge{near} There are {', '.join(words)}")


def _only(pieces: Pieces) -> np.ndarray:
    return pieces[0]


def _replicated(pieces: Pieces) -> np.ndarray:
    first = pieces[0]
    for piece in pieces[1:]:
        if piece.dtype != first.dtype or piece.shape != first.shape:
            raise ValueError("the pieces differ in shape or dtype")
        if piece.tobytes() != first.tobytes():
            raise ValueError("the pieces are not equal")
    return first


def _average(pieces: Pieces) -> np.ndarray:
    if len({piece.shape for piece in pieces}) > 1:
        raise ValueError("the pieces differ in shape")
    mean = sum(piece.astype(np.float32) for piece in pieces) / np.float32(len(pieces))
    return np.asarray(mean).astype(pieces[0].dtype)


def _concatenate(pieces: Pieces, axis: int) -> np.ndarray:
    return np.concatenate(pieces, axis)


def _parts(pieces: Pieces, axis: int, number: int) -> np.ndarray:
    cut = [np.split(piece, number, axis) for piece in pieces]
    return np.concatenate([part for one in zip(*cut, strict=True) for part in one], axis)


def _unpadded(pieces: Pieces, axis: int, size: int) -> np.ndarray:
    whole = np.concatenate(pieces, axis)
    if whole.shape[axis] < size:
        raise ValueError(f"axis {axis} has {whole.shape[axis]}, of which {size} cannot be kept")
    return np.take(whole, np.arange(size), axis)


_MERGES: dict[str, Callable[..., np.ndarray]] = {
    "": _only,
    "replicated": _replicated,
    "average": _average,
    r"concatenate (\d+)": _concatenate,
    r"parts (\d+) of ([1-9]\d*)": _parts,
    r"unpadded (\d+) to (\d+)": _unpadded,
    "dropped": _only,
}
