# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the dtypes of parameters, matrix products and caches.

Router logits, softmaxes, norms, losses, optimiser state and reductions are always float32.

    full   products of attention projections, feed-forwards and experts in the compute dtype
    halo   the same products, forward and backward, in 8 bits (pallas_kernels/halo). It changes the
           loss beyond rounding, so a resumed run must keep it. Routers, norms, head gates,
           embedding, head and the attention softmax are unchanged.

To add a matrix product: a config that extends `MatmulConfig`, its row under `matmul` in
jaxmoe/catalog/executions.py, and its name in tests/test_architecture.py.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import pathlib
from typing import Any, ClassVar, Final, Literal

import jax
import jax.numpy as jnp

from jaxmoe.catalog import Registry
from jaxmoe.configs import check_choices
from pallas_kernels.quantized_array import QuantizedDtype
from sharding.products.encoded import EncodedProduct
from sharding.sequence_parallel.cache_formats import CacheFormat

DtypeName = Literal["float32", "bfloat16"]

WeightFormat = Literal[
    "floating", "w8a8", "w4a8", "w4ax", "w4a4", "w8a16", "w4a16", "fp8", "bitstack"
]
"""Bits of a weight (w) and of the activations multiplied with it (a); 16 is the compute dtype, x
8 bits for the channels with outliers and 4 for the others; bitstack: sums of blocks of signs, in a
checkpoint only."""

STACKED: Final = "bitstack"
"""Format of a checkpoint that is loaded as floating weights."""
QUANTIZED_WEIGHTS: Final[dict[str, tuple[QuantizedDtype, QuantizedDtype | None]]] = {
    "w8a8": ("int8", "int8"),
    "w4a8": ("int4", "int8"),
    "w4ax": ("int4", None),
    "w4a4": ("int4", "int4"),
    "w8a16": ("int8", None),
    "w4a16": ("int4", None),
    "fp8": ("float8_e4m3fn", "float8_e4m3fn"),
}
"""Dtypes of weights and activations by format; None leaves activations in the compute dtype, or to
the matrix itself (w4ax, a `MixedArray`)."""
MIXED: Final = "w4ax"
"""Format whose matrices are sorted by a measurement of their activations."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatmulConfig(abc.ABC):
    """Base class of the configs of the layers' matrix products."""

    name: ClassVar[str]
    """Name in the registry and on the command line."""
    kernels: ClassVar[tuple[str, ...]]
    """Fields of `execution.kernels` that compute these products."""

    @abc.abstractmethod
    def build(self) -> EncodedProduct | None:
        """Return the product that layers use; None for `jnp.einsum`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FullPrecisionConfig(MatmulConfig):
    """Products in the compute dtype."""

    name: ClassVar[str] = "full"
    kernels: ClassVar[tuple[str, ...]] = ("grouped_swiglu",)

    def build(self) -> None:
        """Return None: products use `jnp.einsum`."""
        return


MATMULS = Registry("matmul")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixedConfig:
    """W4A8 for the input channels with the largest activations, W4A4 for the others (COMET's FMPQ,
    arXiv 2410.12168)."""

    wide_fraction: float = 0.125
    """Share of the blocks of input channels whose activations have 8 bits, rounded up; 0 is W4A4 in
    sorted blocks, 1 is W4A8."""
    block_size: int | None = None
    """Largest number of input channels that share a scale; it must divide them. At most 128 and an
    eighth of the inputs, but at least 16, when None."""
    batches: int = 4
    """Held-out batches on which activations are measured, those after the batches of evaluation."""

    def __post_init__(self):
        if not 0.0 <= self.wide_fraction <= 1.0:
            raise ValueError(
                f"mixed.wide_fraction={self.wide_fraction} must be between 0 (all activations in 4"
                " bits) and 1 (all in 8 bits)"
            )
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(
                f"mixed.block_size={self.block_size} must be at least 1, or None for a size that"
                " fits each matrix"
            )
        if self.batches < 1:
            raise ValueError(
                f"mixed.batches={self.batches} must be at least 1: outliers are found by measuring"
            )

    def num_wide(self, blocks: int) -> int:
        """Return the number of blocks whose activations have 8 bits.

        Args:
            blocks: Number of blocks of a matrix.
        """
        return math.ceil(round(self.wide_fraction * blocks, 6))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """Dtypes of stored parameters and of matrix products."""

    parameters: DtypeName = "float32"
    """Stored parameters; the optimiser's moments are float32."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Operands of matrix products; auto: bfloat16 on accelerators and on a CPU that multiplies it
    fast (`multiplies_bfloat16_fast`), float32 on others."""
    matmul: MatmulConfig = FullPrecisionConfig()
    """Matrix product of the layers; a resumed run must keep it."""

    weights: WeightFormat = "floating"
    """Format of the matrices of attention, feed-forwards and experts; other than floating only for
    inference on a run rounded by `jaxmoe checkpoint convert`."""
    mixed: MixedConfig | None = None
    """Blocks of the format w4ax; None for the defaults."""
    cache: CacheFormat = "compute"
    """Format of cached keys and values: the compute dtype, or rounded with a scale per token and
    head, for inference only. A pass without a cache rounds them in the same way."""

    def __post_init__(self):
        check_choices("execution.precision", self)

    @property
    def has_floating_weights(self) -> bool:
        """Whether products have floating weights, as trained or after they were loaded."""
        return self.weights in ("floating", STACKED)

    @property
    def activations(self) -> QuantizedDtype | None:
        """Dtype that activations are rounded to before a quantised weight; None for none."""
        return QUANTIZED_WEIGHTS[self.weights][1] if self.weights in QUANTIZED_WEIGHTS else None

    def check_trains(self, *, has_adapter: bool = False) -> None:
        """Refuse formats that have no gradient.

        Args:
            has_adapter: Whether an adapter is trained: its base may have quantised weights.

        Raises:
            ValueError: Quantised weights that are trained, activations in few bits, or a quantised
                cache.
        """
        is_quantised_base = self.weights in ("w4a16", "w8a16") and has_adapter
        for field, floating in (("weights", "floating"), ("cache", "compute")):
            if field == "weights" and is_quantised_base:
                continue
            if (value := getattr(self, field)) != floating:
                raise ValueError(
                    f"execution.precision.{field}={value!r} is for inference, and training needs"
                    f" {floating!r}: leave it out, and round a finished run (jaxmoe"
                    " checkpoint convert; --cache of jaxmoe generate)"
                )

    @property
    def parameter_dtype(self) -> Any:
        """Dtype of stored parameters."""
        return jnp.dtype(self.parameters)

    @property
    def compute_dtype(self) -> Any:
        """Dtype of matrix products; "auto" asks JAX for its backend, and a CPU for its kind."""
        if self.compute == "auto":
            is_slow = jax.default_backend() == "cpu" and not multiplies_bfloat16_fast()
            return jnp.dtype("float32" if is_slow else "bfloat16")
        return jnp.dtype(self.compute)


_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16"})
_CPUINFO = pathlib.Path("/proc/cpuinfo")


@functools.cache
def multiplies_bfloat16_fast() -> bool:
    """Return whether products in bfloat16 are faster than in float32 on this CPU.

    They are with instructions for them (x86: avx512_bf16 or amx_bf16) and a JAX whose XLA uses
    these, 0.12 or newer: products take 1.9 to 3.6 times the rate of float32 there, and gain nothing
    on 0.10. Several devices of a CPU (`--xla_force_host_platform_device_count`) stand in for
    accelerators, to compare meshes with one device: they compute in float32.
    """
    return (
        jax.__version_info__ >= (0, 12)
        and jax.local_device_count("cpu") == 1
        and bool(_INSTRUCTIONS & _instructions())
    )


def _instructions() -> frozenset[str]:
    """Return the instruction sets of this CPU, as Linux names them; empty where it does not."""
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
