# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels that None chooses with the reference, once for each kind of device.

    for verdict in prove(directory="~/.cache/jaxmoe"):
        print(verdict)

Small random inputs, value and gradients, memory filled with NaN before, all on the first device of
this process. A kernel that differs, or fails, is not chosen any more in this process
(`backend.distrust`). Verdicts are kept by kind of device, version of jax and of the driver, and the
sources of this package.

To add an operation: its case in `CASES` of `pallas_kernels/proof.py`.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import OPERATIONS
from pallas_kernels.backend import Implementation, Operation, device_kind, distrust
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_swiglu import grouped_swiglu
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_array import quantize
from pallas_kernels.quantized_matmul import quantized_matmul

TOLERANCE = 0.03
"""Largest difference of a value or a gradient, over its norm; bfloat16 gives 0.004 to 0.01."""

# Of lowering, compiling and running a kernel; none of them may end a run that can do without it.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)

Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""Function of (implementation, *arrays), the arrays, and those that have a gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the comparison of one kernel found."""

    operation: str
    implementation: Implementation
    error: float | None
    """Largest difference over the norm of what it differs from; None where the kernel failed."""
    words: str = ""
    """Why it failed, or what differs most."""

    @property
    def is_right(self) -> bool:
        """Whether the kernel may be chosen."""
        return self.error is not None and self.error <= TOLERANCE

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.operation}: {self.implementation} failed: {self.words}"
        relation = "equals" if self.is_right else "differs from"
        return (
            f"{self.operation}: {self.implementation} {relation} the reference (largest difference"
            f" {self.error:.2g} of the norm, of {self.words})"
        )


def _drawn(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values / np.sqrt(shape[-1]), jnp.bfloat16)


def _attention(scale: int) -> Case:
    q, k, v = (_drawn(i, 2, 128 * scale, heads, 64) for i, heads in enumerate((4, 2, 2)))
    segments = jnp.asarray(np.arange(128 * scale) // 100 + np.zeros((2, 1)), jnp.int32)

    def run(implementation: Implementation, *arrays: Any) -> Any:
        return flash_attention(
            *(8.0 * x for x in arrays),
            q_segment_ids=segments,
            kv_segment_ids=segments,
            implementation=implementation,
        )[0]

    return run, (q, k, v), (0, 1, 2)


def _rows(scale: int) -> tuple[jax.Array, jax.Array]:
    """Return rows of which the last ones are not read, and the sizes of five groups."""
    sizes = scale * np.asarray([70, 0, 1, 120, 33])
    rows = _drawn(3, 256 * scale, 128).at[int(sizes.sum()) :].set(jnp.nan)
    return rows, jnp.asarray(sizes, jnp.int32)


def _matmul(scale: int) -> Case:
    rows, sizes = _rows(scale)

    def run(implementation: Implementation, rows: Any, weights: Any) -> Any:
        return grouped_matmul(rows, weights, sizes, implementation=implementation)

    return run, (rows, _drawn(4, 5, 128, 256)), (0, 1)


def _outer(scale: int) -> Case:
    rows, sizes = _rows(scale)

    def run(implementation: Implementation, rows: Any, others: Any) -> Any:
        return grouped_outer(rows, others, sizes, implementation=implementation)

    return run, (rows, _drawn(5, 256 * scale, 256)), ()


def _swiglu(scale: int) -> Case:
    rows, sizes = _rows(scale)

    def run(implementation: Implementation, rows: Any, gate_up: Any, down: Any) -> Any:
        return grouped_swiglu(8.0 * rows, gate_up, down, sizes, implementation=implementation)

    return run, (rows, _drawn(6, 5, 128, 2, 256), _drawn(7, 5, 256, 128)), (0, 1, 2)


def _quantized(scale: int) -> Case:
    w = quantize(_drawn(8, 128, 256), "int8", axis=-2)

    def run(implementation: Implementation, x: Any) -> Any:
        return quantized_matmul(x, w, implementation=implementation)

    return run, (_drawn(9, 64 * scale, 128),), (0,)


def _pages(scale: int) -> Case:
    """Two singles and two pieces over pages in any order; what no query sees is large."""
    size, width, length = 16, 4 * scale, 24
    ends = np.asarray([1, 60 * scale, 64 * scale, 17])
    shape = (2, 4 * width, size, 2, 2, 128)
    rng = np.random.default_rng(10)
    table = rng.permutation(4 * width).reshape(4, width)
    pool = 11.0 * np.asarray(_drawn(11, *shape), np.float32)
    for row, end in zip(table, ends, strict=True):
        held = pool[1, row].reshape(-1, *shape[3:])
        held[end:] = 1e4
        pool[1, row] = held.reshape(width, *shape[2:])
    places = np.maximum(ends[2:] - length, 0)[:, None] + np.arange(length)
    pieces = np.where(places < ends[2:, None], places, -1)  # the second is not full
    positions = jnp.asarray(np.concatenate([ends[:2] - 1, pieces.reshape(-1)]), jnp.int32)
    singles, parts = (jnp.asarray(rows, jnp.int32) for rows in (table[:2], table[2:]))

    def run(implementation: Implementation, q: Any, pool: Any) -> Any:
        out = paged_attention(
            8.0 * q,
            pool,
            jnp.int32(1),
            singles,
            parts,
            positions,
            window=100,
            implementation=implementation,
        )
        return jnp.where((positions >= 0)[:, None, None], out, 0)

    return run, (_drawn(12, 2 + 2 * length, 4, 128), jnp.asarray(pool, jnp.bfloat16)), ()


CASES: Mapping[str, Callable[[int], Case]] = {
    "flash_attention": _attention,
    "grouped_matmul": _matmul,
    "grouped_outer": _outer,
    "grouped_swiglu": _swiglu,
    "paged_attention": _pages,
    "quantized_matmul": _quantized,
}
"""The case of each operation, by the factor on its smallest size."""


def compare(
    name: str, implementation: Implementation, *, scales: Iterable[int] = (1, 3)
) -> Verdict:
    """Return whether an implementation computes what the reference does.

    Args:
        name: Operation with a case.
        implementation: Implementation that runs on the first device.
        scales: Factors on the sizes.
    """
    worst, words = 0.0, "the value"
    for scale in scales:
        run, arrays, with_gradient = CASES[name](scale)
        try:
            found = _computed(functools.partial(run, implementation), arrays, with_gradient)
        except _FAILURES as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return Verdict(
                operation=name, implementation=implementation, error=None, words=text[:200]
            )
        wanted = _computed(functools.partial(run, "reference"), arrays, with_gradient)
        for part, value in found.items():
            error = _difference(value, wanted[part])
            if not error <= worst:  # NaN is the worst
                worst, words = error, part
    return Verdict(
        operation=name,
        implementation=implementation,
        error=worst if np.isfinite(worst) else float("inf"),
        words=words,
    )


def prove(
    names: Iterable[str] = tuple(CASES),
    *,
    directory: str | os.PathLike[str] | None = None,
    scales: Iterable[int] = (1, 3),
    operations: Mapping[str, Operation] = OPERATIONS,
) -> list[Verdict]:
    """Compare the kernels that None chooses on the first device, and distrust those that differ.

    Args:
        names: Operations; those without a case, and those for which None chooses no kernel, are
            left out.
        directory: Directory in which verdicts are kept; None compares anew.
        scales: Factors on the smallest sizes.
        operations: Operations by name.

    Returns:
        A verdict for each kernel.
    """
    verdicts, known = [], _read(directory)
    for name in names:
        chosen = operations[name].choose().implementation
        if name not in CASES or not chosen.startswith("pallas"):
            continue
        verdict = known.get(name)
        if verdict is None or verdict.implementation != chosen:
            verdict = known[name] = compare(name, chosen, scales=scales)
            _write(directory, known)
        if not verdict.is_right:
            distrust(name, chosen, str(verdict))
            warnings.warn(f"{verdict}; None no longer chooses it", stacklevel=2)
        verdicts.append(verdict)
    return verdicts


def _computed(
    run: Callable[..., Any], arrays: tuple[Any, ...], with_gradient: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Return the value, and the gradient of a weighted sum by each array."""

    def weighted(*arrays: Any) -> tuple[Any, Any]:
        value = run(*arrays)
        weights = jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
        return jnp.sum(value.astype(jnp.float32) * weights), value

    function = jax.value_and_grad(weighted, with_gradient, has_aux=True) if with_gradient else None
    shapes = jax.eval_shape(run, *arrays), *arrays
    poison = [jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.tree.leaves(shapes)]
    jax.block_until_ready(poison)
    del poison  # what a kernel does not write is now likely to be NaN
    if function is None:
        return {"the value": jax.block_until_ready(jax.jit(run)(*arrays))}
    (_, value), gradients = jax.block_until_ready(jax.jit(function)(*arrays))
    names = (f"the gradient of argument {place}" for place in with_gradient)
    return {"the value": value, **dict(zip(names, gradients, strict=True))}


def _difference(value: Any, wanted: Any) -> float:
    value, wanted = (np.asarray(x).astype(np.float64) for x in (value, wanted))
    norm = max(float(np.linalg.norm(wanted)), 1e-30)
    return float(np.linalg.norm(value - wanted)) / norm


@functools.cache
def _key() -> str:
    """Return what verdicts depend on, as a name."""
    sources = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    version = jax.devices()[0].client.platform_version
    parts = (device_kind(), jax.__version__, version, sources.hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _read(directory: str | os.PathLike[str] | None) -> dict[str, Verdict]:
    if directory is None:
        return {}
    path = pathlib.Path(directory).expanduser() / f"kernels-{_key()}.json"
    try:
        return {row["operation"]: Verdict(**row) for row in json.loads(path.read_text())}
    except (OSError, ValueError, TypeError, KeyError):  # absent or damaged: compared anew
        return {}


def _write(directory: str | os.PathLike[str] | None, verdicts: Mapping[str, Verdict]) -> None:
    if directory is None:
        return
    folder = pathlib.Path(directory).expanduser()
    rows = [dataclasses.asdict(verdict) for verdict in verdicts.values()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"kernels-{_key()}.{os.getpid()}.part"
        part.write_text(json.dumps(rows))
        part.replace(folder / f"kernels-{_key()}.json")
    except OSError as error:
        warnings.warn(f"verdicts on kernels are not kept: {error}", stacklevel=2)
