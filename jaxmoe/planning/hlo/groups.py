# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parses the device groups of HLO collectives: lists, iota form and mesh axes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

Groups = tuple[tuple[int, ...], ...]


def parse_lists(text: str) -> Groups:
    """Return the groups or pairs of `{{0,1},{2,3}}`."""
    groups = re.findall(r"\{([\d, ]*)\}", text)
    return tuple(tuple(int(i) for i in group.split(",")) for group in groups if group)


def _iota(text: str) -> np.ndarray:
    """Return `[4,2]T(1,0)`, numbers from 0 in this shape, transposed; `[8]<=` reshapes them."""
    shape, sizes, order = _parts(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    numbers = np.arange(math.prod(_integers(sizes))).reshape(_integers(sizes))
    numbers = numbers.transpose(_integers(order) if order else None)
    return numbers.reshape(_integers(shape)) if shape else numbers


def parse_groups(text: str) -> Groups:
    """Return the replica groups at the beginning of a text, in any of the three forms.

    Raises:
        ValueError: The form is not one of the three.
    """
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        return tuple(map(tuple, _iota(text).tolist()))
    return parse_lists(text[: text.find("}}") + 2]) if text.startswith("{{") else ()


def _mesh_groups(text: str) -> Groups:
    """Return the groups of `mesh['a'=2,'b'=4] {'b'}`.

    Also with `, device_ids=(...)`; `'b':(1)2` is the part of size 2 of b after parts of size 1.
    """
    form = r"mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}"
    axes, ids, grouped = _parts(form, text)
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    chosen = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", grouped)
    ]
    # Split every axis at the bounds of its chosen parts; the first part varies slowest.
    factors: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        bounds = {1, size}
        for axis, before, part in chosen:
            bounds |= {before, before * part} if axis == name else set()
        cuts = sorted(bounds)
        for before, after in zip(cuts, cuts[1:], strict=False):
            place[name, before] = len(factors)
            factors.append(after // before)
    devices = np.arange(math.prod(factors))
    if ids:
        devices = _iota(ids) if "]T" in ids else np.asarray(_integers(ids))
    places = [place[name, before] for name, before, size in chosen if size > 1]
    remaining = [i for i in range(len(factors)) if i not in places]
    width = math.prod(factors[i] for i in places)
    groups = devices.reshape(factors).transpose(remaining + places).reshape(-1, width)
    return tuple(map(tuple, groups.tolist()))


def _parts(form: str, text: str) -> tuple[str | Any, ...]:
    match = re.match(form, text)
    if match is None:
        raise ValueError(f"unknown form of replica groups: {text[:80]!r}")
    return match.groups()


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
