# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names the implementation of each kernel that a model uses; `pallas_kernels` has them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from pallas_kernels import OPERATIONS
from pallas_kernels.backend import Implementation, distrust
from pallas_kernels.proof import CASES, KERNELS, Verdict, prove
from sharding.distributed import gather


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """Implementation of each kernel; None picks one that can run and logs which."""

    products: ClassVar[tuple[str, ...]] = ("grouped_swiglu", "quantized_matmul", "grouped_matmul")
    """Fields of the kernels that a choice of `execution.precision.matmul` computes with or not."""

    attention: Implementation | None = None
    """Implementation of `pallas_kernels.flash_attention`, and of `paged_attention` in serving."""
    grouped_swiglu: Implementation | None = None
    """Implementation of `pallas_kernels.grouped_swiglu`, the experts."""
    quantized_matmul: Implementation | None = None
    """Implementation of `pallas_kernels.quantized_matmul`, dense products in few bits."""
    grouped_matmul: Implementation | None = None
    """Implementation of `pallas_kernels.grouped_matmul`, the experts in few bits."""
    state_space_dual: Implementation | None = None
    """Implementation of `pallas_kernels.state_space_dual`, the states of Mamba-2."""
    selective_scan: Implementation | None = None
    """Implementation of `pallas_kernels.selective_scan`, the states of Mamba."""
    expert_rows: Literal["gathered", "indexed"] = "gathered"
    """Form of the rows of experts. gathered: sorted into an array; indexed: kernels of TPUs copy
    tokens by index while they multiply, in both passes, which saves that memory (the time is not
    measured). Rows that travel, other kernels, and routers that are not token-major gather."""

    @property
    def by_operation(self) -> dict[str, Implementation | None]:
        """The same by the name of the operation."""
        has_pages = self.attention in OPERATIONS["paged_attention"].implementations
        return {
            "flash_attention": self.attention,
            # Some attention is for training alone, as cuDNN's: serving has pages.
            "paged_attention": self.attention if has_pages else None,
            "grouped_swiglu": self.grouped_swiglu,
            "quantized_matmul": self.quantized_matmul,
            "grouped_matmul": self.grouped_matmul,
            "state_space_dual": self.state_space_dual,
            "selective_scan": self.selective_scan,
        }

    def prepare(
        self, mesh: Mesh | None, *, serves: bool = False, left_out: Collection[str] = ()
    ) -> None:
        """Refuse what cannot run on a mesh, and compare the kernels that are chosen by default.

        Kernels are compared with the reference once for each kind of device, and where there is no
        directory of compiled programs once in each process; what differs is not used, with a
        warning.

        Args:
            mesh: Mesh of the model; None for one device.
            serves: Whether the model answers requests, whose attention reads pages.
            left_out: Operations that the model does not call, which are not compared.

        Raises:
            ValueError: An implementation that is asked for cannot run; names the field.
        """
        with contextlib.ExitStack() as stack:
            if mesh is not None:
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            for name, choice in self.by_operation.items():
                try:
                    OPERATIONS[name].choose(choice)
                except ValueError as error:
                    field = "attention" if name.endswith("_attention") else name
                    raise ValueError(f"execution.kernels.{field}={choice}: {error}") from error
        if jax.default_backend() != "cpu":
            shared = mesh is not None and mesh.is_multi_process
            pages = () if serves else ("paged_attention",)
            self._prove(is_shared=shared, left_out={*left_out, *pages})

    def prepare_once(self, mesh: Mesh | None) -> None:
        """Do what `prepare` does for a model that serves, the first time in this process.

        Args:
            mesh: Mesh of the model; None for one device.

        Raises:
            ValueError: As `prepare` does, every time.
        """
        _prepare(self, mesh)

    def _prove(self, *, is_shared: bool, left_out: Collection[str] = ()) -> None:
        """Compare the kernels of the default; what one process finds wrong, none of them uses.

        Args:
            is_shared: Whether other processes compute on the mesh, and do the same now.
            left_out: Operations that are not compared.
        """
        cache = getattr(jax.config, "jax_compilation_cache_dir", None)
        choice = self.by_operation
        names = [
            operation
            for operation in sorted(CASES)
            if choice.get(operation) is None and operation not in left_out
        ]
        verdicts = _compare(names, None if cache is None or "://" in cache else cache)
        if not is_shared:
            return
        wrong = {
            (verdict.operation, verdict.implementation)
            for verdict in verdicts
            if not verdict.is_right
        }
        kernels: list[tuple[str, Implementation]]
        kernels = [(name, implementation) for name in names for implementation in KERNELS]
        # Processes with different kernels would compile different programs, and wait for ever.
        flags = np.max(
            gather(np.asarray([kernel in wrong for kernel in kernels], np.int32)), axis=0
        )
        for (name, kernel), is_wrong in zip(kernels, flags, strict=True):
            if is_wrong and (name, kernel) not in wrong:
                distrust(name, kernel, f"another process found {name} wrong")


_VERDICTS: dict[str, list[Verdict]] = {}
"""What comparisons in this process found, by operation."""


def _compare(names: Sequence[str], directory: str | None) -> list[Verdict]:
    """Return the verdicts on the kernels of some operations; each is compared once in a process.

    Args:
        names: Operations.
        directory: Directory in which verdicts are kept, or None.
    """
    new = [name for name in names if name not in _VERDICTS]
    verdicts = prove(new, directory=directory) if new else []
    _VERDICTS.update(
        {name: [verdict for verdict in verdicts if verdict.operation == name] for name in new}
    )
    return [verdict for name in names for verdict in _VERDICTS[name]]


@functools.lru_cache
def _prepare(kernels: KernelsConfig, mesh: Mesh | None) -> None:
    kernels.prepare(mesh, serves=True)
