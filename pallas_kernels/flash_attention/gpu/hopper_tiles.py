# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Hopper kernels of flash_attention, and the heads that they take.

A program keeps `KEPT` rows of one side and lets blocks of `passing` rows of the other side pass
through `stages` slots. The limits are shared memory, which holds both, and registers: a computing
warpgroup holds 64 rows of its sums and of the scores. Pure arithmetic, without a device.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gpu.hopper_parts import COMPUTING, ROWS, SHARED

KEPT = COMPUTING * ROWS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Rows that pass at a time, and slots of the ring."""

    passing: int
    stages: int
    together: tuple[str, ...] = ("kv",)
    """Which of d_k and d_v each kernel sums."""


def reason_against(dtype: Any, h: int, hv: int, *, backward: bool) -> str | None:
    """Return why these kernels do not take such heads; None where they do."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"WGMMA kernels take bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if max(h, hv) <= 32:
        return f"heads {max(h, hv)} wide would fill less than half of a tile, which is 64"
    if (tiles_backward if backward else tiles_forward)(h, hv) is None:
        passes = "backward" if backward else "forward"
        return f"heads {h} and {hv} wide do not fit the registers of the {passes} pass"
    return None


def tiles_forward(h: int, hv: int) -> Tiles | None:
    """Return the tiles of the forward pass, keys h and values hv wide; None where none fits."""
    h = filled_width(h)
    hv = filled_width(hv)
    if max(h, hv) > 256:
        return None
    resident_bytes = 2 * KEPT * (h + (0 if h == hv else hv))
    for passing in (128, 64):
        # Registers of a thread: rows of 64 over 128 threads, out and scores in float32.
        if (hv + passing) // 2 <= 160 and resident_bytes + 2 * 2 * passing * (h + hv) <= SHARED:
            return Tiles(passing=passing, stages=2)
    return None


def tiles_backward(h: int, hv: int) -> tuple[Tiles, Tiles] | None:
    """Return the tiles of d_q, and of d_k and d_v; None where sums do not fit registers."""
    h = filled_width(h)
    hv = filled_width(hv)
    if h + hv > 320:
        return None
    resident_bytes = 2 * KEPT * (h + hv)
    keys = 128 if h <= 128 and resident_bytes + 2 * 2 * 128 * (h + hv) <= SHARED else 64
    of_d_kv = min(3, (SHARED - resident_bytes) // (2 * 64 * (h + hv + 4)))
    # 64 queries at least: WGMMA takes its right operand in pieces of that many rows.
    together = ("kv",) if h + hv <= 256 else ("k", "v")
    return (
        Tiles(passing=keys, stages=2),
        Tiles(passing=64, stages=of_d_kv, together=together),
    )


def filled_width(width: int) -> int:
    """Return the padded width of a head: whole tiles of 64 columns, which are 128 bytes."""
    return -(-width // 64) * 64
