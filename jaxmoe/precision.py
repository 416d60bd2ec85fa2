# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which dtype holds what. Casts happen at a room's door, never in the middle of its arithmetic.

Router logits, softmaxes, norms, losses, optimiser state and reductions are always float32 and are
not a choice.

    full   the products of attention's projections, feed-forward layers and experts in `compute`
    halo   the same products, forward and backward, in 8 bits (pallas_kernels/halo): numbers beyond
           rounding, which is why a run that goes on may not change it. Routers, norms, the gate of
           attention's heads, embedding, head and the softmax of attention stay as they are.

To add a way to multiply: a class with `build`, a member of `MatmulConfig`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final, Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.halo import Halo
from pallas_kernels.quantized_array import QuantizedDtype
from sharding.products.halo import Gathered, HaloProduct
from sharding.sequence_parallel.cache_formats import CacheFormat

DtypeName = Literal["float32", "bfloat16"]

WeightFormat = Literal["floating", "w8a8", "w4a8", "w8a16", "w4a16", "fp8"]
"""w: bits of a weight, a: bits of the activations that meet it; 16: the compute dtype."""

QUANTIZED_WEIGHTS: Final[dict[str, tuple[QuantizedDtype, QuantizedDtype | None]]] = {
    "w8a8": ("int8", "int8"),
    "w4a8": ("int4", "int8"),
    "w8a16": ("int8", None),
    "w4a16": ("int4", None),
    "fp8": ("float8_e4m3fn", "float8_e4m3fn"),
}
"""By format the dtypes of weights and of activations; None: these stay in the compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FullPrecisionConfig:
    """Products in the compute dtype."""

    name: ClassVar[str] = "full"
    kernels: ClassVar[tuple[str, ...]] = ("grouped_swiglu",)
    """Fields of `execution.kernels` that compute these products."""

    def build(self) -> None:
        """Nothing stands between a product and `jnp.einsum`."""
        return


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HaloConfig:
    """Products in 8 bits, rotated first (HALO, arXiv 2501.02625)."""

    name: ClassVar[str] = "halo"
    kernels: ClassVar[tuple[str, ...]] = ("quantized_matmul", "grouped_matmul")
    """Fields of `execution.kernels` that compute these products."""

    dtype: Literal["int8", "float8_e4m3fn"] = "int8"
    """Of both factors, forward and backward."""
    level: Literal[0, 1, 2] = 2
    """0: no rotation; 1: along features; 2: gradients also over tokens. int8 needs 2; float8 does
    with 1, or 0."""
    block: int | None = 128
    """The most features or tokens that are rotated together; None: all that a device has."""
    gathered: Gathered = "codes"
    """What of a fully sharded weight travels: its codes in 8 bits, or the weight itself."""

    def __post_init__(self):
        if self.block is not None and self.block < 2:
            raise ValueError(
                f"precision.matmul.block={self.block} must be at least 2, or None for all; without"
                " rotations set precision.matmul.level to 0"
            )

    def build(self) -> HaloProduct:
        """What a layer multiplies with."""
        halo = Halo(dtype=self.dtype, level=self.level, block=self.block)
        return HaloProduct(halo=halo, gathered=self.gathered)


MatmulConfig = FullPrecisionConfig | HaloConfig


def kernels_of_products() -> dict[str, str]:
    """Return for each kernel of products the name of the matmul config that runs it."""
    return {name: config.name for config in get_args(MatmulConfig) for name in config.kernels}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """Dtypes of stored parameters and of matrix products."""

    parameters: DtypeName = "float32"
    """Stored parameters; the optimiser's moments are float32."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Operands of matrix products; auto: bfloat16 on accelerators, float32 on the CPU."""
    matmul: MatmulConfig = FullPrecisionConfig()
    """How the products of layers are taken; a resumed run must keep it."""

    weights: WeightFormat = "floating"
    """Matrices of attention, feed-forward layers and experts. Not floating: of a run that
    `experiments.checkpoint convert` has rounded, for inference alone."""
    cache: CacheFormat = "compute"
    """Keys and values that decoding keeps: in the compute dtype or rounded, with a scale for each
    token and head. Without a cache they are rounded as one would: for inference alone."""

    @property
    def activations(self) -> QuantizedDtype | None:
        """What activations are rounded to before they meet a quantised weight."""
        return QUANTIZED_WEIGHTS[self.weights][1] if self.weights in QUANTIZED_WEIGHTS else None

    def check_trains(self) -> None:
        """Refuses what has no gradient.

        Raises:
            ValueError: quantised weights, or a quantised cache.
        """
        for field, floating in (("weights", "floating"), ("cache", "compute")):
            if (value := getattr(self, field)) != floating:
                raise ValueError(
                    f"execution.precision.{field}={value!r} is for inference, and training needs"
                    f" {floating!r}: leave it out, and round a finished run (python -m"
                    " experiments.checkpoint convert; --cache of experiments.generate)"
                )

    @property
    def parameter_dtype(self) -> Any:
        """The dtype of stored parameters."""
        return jnp.dtype(self.parameters)

    @property
    def compute_dtype(self) -> Any:
        """The dtype of matrix products; asks JAX for its backend when "auto"."""
        if self.compute == "auto":
            return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
        return jnp.dtype(self.compute)
