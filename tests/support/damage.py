# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kinds of damage to a file, as disks and killed processes leave it.

To add a kind of damage: a function in DAMAGE of `tests/support/damage.py`.
"""

import os


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def zero_a_page(path, rng):
    data = bytearray(path.read_bytes())
    first = int(rng.integers(len(data)))
    data[first : first + 4096] = bytes(len(data[first : first + 4096]))
    path.write_bytes(data)


def truncate(path, rng):
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def delete(path, rng):
    path.unlink()


def zero(path, rng):
    path.write_bytes(bytes(path.stat().st_size))


def swap(path, rng):
    others = sorted(p for p in path.parent.iterdir() if p.is_file() and p != path)
    if others:
        other = others[rng.integers(len(others))]
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two), other.write_bytes(one)


DAMAGE = (flip, zero_a_page, truncate, delete, zero, swap)
