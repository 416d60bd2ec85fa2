# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What was measured of the kernels, on which device and when: the reason of a choice.

The rates are of bfloat16, medians of seven rounds of eight calls, in one run for each date. Limits
of the same runs, for an H100: a dense product of 8192^3 700 TFLOP/s, a copy of 512 MB 2.73 TB/s.

To add a measurement: a row in `MEASURED` of `pallas_kernels/measured.py`. Rows that contradict
`PREFERENCE` of `pallas_kernels/backend.py` become a refusal of the operation.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One implementation beside the one that runs everywhere."""

    operation: str
    device: str
    """Part of the name of the kind of device."""
    implementation: str
    case: str
    """Sizes."""
    rate: float
    """TFLOP/s, or milliseconds where `is_time`."""
    xla: float | None
    """The same of `xla`; None where it was not measured or ran out of memory."""
    limit: float
    """The same of a dense product of as many rows, or of a copy of the bytes."""
    date: str
    is_time: bool = False

    @property
    def share(self) -> float:
        """Share of the limit that was reached."""
        return self.limit / self.rate if self.is_time else self.rate / self.limit

    @property
    def gain(self) -> float | None:
        """How many times as fast as `xla`."""
        if self.xla is None:
            return None
        return self.xla / self.rate if self.is_time else self.rate / self.xla


def _h100(
    operation: str,
    case: str,
    rate: float,
    xla: float | None,
    limit: float,
    *,
    is_time: bool = False,
    implementation: str = "pallas_gpu",
) -> Measurement:
    return Measurement(
        operation=operation,
        device="H100",
        implementation=implementation,
        case=case,
        rate=rate,
        xla=xla,
        limit=limit,
        date="2026-11-27",
        is_time=is_time,
    )


def _cudnn(case: str, rate: float, xla: float | None = None) -> Measurement:
    """Return a row of `jax.nn.dot_product_attention(implementation="cudnn")`, whose custom calls
    are those of `flash_attention`."""
    return _h100("flash_attention", case, rate, xla, 700, implementation="cudnn")


MEASURED: tuple[Measurement, ...] = (
    _h100("flash_attention", "4 x 4096, 16 heads of 128", 489, 12, 700),
    _h100("flash_attention", "4 x 4096, 16 heads of 128, with backward", 373, 15, 700),
    _h100("flash_attention", "1 x 16384, 32 of 4 heads of 128", 584, None, 700),
    _h100("flash_attention", "1 x 16384, 32 of 4 heads of 128, with backward", 483, None, 700),
    _h100("flash_attention", "2 x 8192, 32 of 8 heads of 64", 404, None, 700),
    _h100("flash_attention", "2 x 8192, 32 of 8 heads of 64, with backward", 371, None, 700),
    _h100("flash_attention", "4 x 4096, window 1024", 362, None, 700),
    _h100("flash_attention", "4 x 4096, window 1024, with backward", 236, None, 700),
    _h100("flash_attention", "2 x 4096, 16 of 8 heads of 256", 566, None, 700),
    _h100("flash_attention", "2 x 4096, 16 of 8 heads of 256, with backward", 99, None, 700),
    _cudnn("4 x 4096, 16 heads of 128", 502, 12),
    _cudnn("4 x 4096, 16 heads of 128, with backward", 426, 15),
    _cudnn("1 x 16384, 32 of 4 heads of 128", 570),
    _cudnn("1 x 16384, 32 of 4 heads of 128, with backward", 534),
    _cudnn("2 x 8192, 32 of 8 heads of 64", 427),
    _cudnn("2 x 8192, 32 of 8 heads of 64, with backward", 384),
    _cudnn("4 x 4096, window 1024", 383),
    _cudnn("4 x 4096, window 1024, with backward", 322),
    _cudnn("2 x 4096, 16 of 8 heads of 256", 518),
    _cudnn("2 x 4096, 16 of 8 heads of 256, with backward", 344),
    _h100("grouped_swiglu", "OLMoE, 131072 rows", 584, 108, 700),
    _h100("grouped_swiglu", "OLMoE, 131072 rows, with backward", 621, 170, 700),
    _h100("grouped_swiglu", "Qwen3, 131072 rows", 557, 62, 700),
    _h100("grouped_swiglu", "Qwen3, 131072 rows, with backward", 603, 136, 700),
    _h100("grouped_matmul", "131072 x 2048 x 1024, 64 groups", 666, 40, 700),
    _h100("grouped_matmul", "131072 x 2048 x 768, 128 groups", 598, 26, 700),
    _h100("grouped_matmul", "32768 x 4096 x 14336, 8 groups", 674, 364, 700),
    _h100("grouped_matmul", "512 rows of 64 groups, ms", 0.129, 1.57, 0.092, is_time=True),
    _h100("grouped_outer", "131072 x 2048 x 1024, 64 groups", 602, 40, 700),
    _h100("grouped_outer", "131072 x 2048 x 768, 128 groups", 554, 29, 700),
    # Times of one layer, ms; the limit is the cache at 2.93 TB/s.
    _h100("paged_attention", "64 over 256, 16 heads of 128", 0.0602, 0.269, 0.0458, is_time=True),
    _h100("paged_attention", "8 over 4096, 16 heads of 128", 0.112, 0.537, 0.0916, is_time=True),
    _h100("paged_attention", "64 over 4096, 16 heads of 128", 0.804, 2.61, 0.733, is_time=True),
    _h100("paged_attention", "64 over 4096, 32 of 4 heads", 0.212, 0.862, 0.183, is_time=True),
    _h100("quantized_matmul", "int8 x int8, 2048 x 4096 x 4096", 828, 278, 895),
    _h100("quantized_matmul", "fp8 x fp8, 2048 x 4096 x 4096", 716, 563, 892),
    _h100("quantized_matmul", "int4 weights, 2048 rows", 259, 37, 568),
    _h100("quantized_matmul", "int4 weights, 16 rows, ms", 0.055, 0.49, 0.011, is_time=True),
    _h100("quantized_matmul", "int8 x int8, 16 rows, ms", 0.075, 0.073, 0.022, is_time=True),
)


def words(operation: str, implementation: str, device_kind: Callable[[], str]) -> str | None:
    """Return what was measured of an implementation on this device; None if nothing was.

    Args:
        operation: Name of the operation.
        implementation: Name of the implementation.
        device_kind: Function that returns the kind of device; called if there is any row.
    """
    rows = [
        row
        for row in MEASURED
        if (row.operation, row.implementation) == (operation, implementation)
    ]
    if not rows:
        return None
    kind = device_kind()
    rows = [row for row in rows if row.device in kind and row.gain is not None]
    if not rows:
        return None
    gains = _range([row.gain for row in rows if row.gain is not None], ".2g")
    shares = _range([100.0 * row.share for row in rows], ".0f")
    return (
        f"{gains} times as fast as xla and at {shares}% of the limit on {rows[0].device}, "
        f"measured on {rows[0].date}"
    )


def _range(values: list[float], form: str) -> str:
    low, high = (format(x, form) for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
