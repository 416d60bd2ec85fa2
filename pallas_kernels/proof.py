# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels that None chooses with the reference, once for each kind of device.

    for verdict in prove(directory="~/.cache/jaxmoe"):
        print(verdict)

Small random inputs, value and gradients, memory filled with NaN before, all on the first device of
this process. A kernel that differs, or fails, is not chosen any more in this process
(`backend.distrust`), and the one that None then chooses for the case is compared. Verdicts are kept
by kind of device, version of jax and of the driver, and the sources of this package.

To add an operation: its cases in `CASES` of `pallas_kernels/proof.py`, one for each class of
arguments between which None chooses.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import OPERATIONS
from pallas_kernels.backend import Choice, Implementation, Operation, device_kind, distrust
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_swiglu import grouped_swiglu
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_array import quantize
from pallas_kernels.quantized_matmul import quantized_matmul

_THREADS = 8

_ALONE = threading.Lock()
"""Held while one program runs, so that the memory that it gets is the poisoned one."""

# The few products of a comparison are not worth the search for their fastest kernels.
_WITHOUT_TUNING = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

TOLERANCE = 0.03
"""Largest difference of a value or a gradient, over its norm; bfloat16 gives 0.004 to 0.01."""

# Of lowering, compiling and running a kernel; none of them may end a run that can do without it.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)

KERNELS: tuple[Implementation, ...] = ("pallas_tpu", "cudnn", "pallas_gpu")
"""Implementations that are compared before they are used."""


class Case(NamedTuple):
    """A call of an operation."""

    run: Callable[..., Any]
    """Function of (implementation, *arrays), to an array, or several of which the first one has a
    gradient."""
    arrays: tuple[Any, ...]
    with_gradient: tuple[int, ...]
    """Places of the arrays that have a gradient."""
    arguments: tuple[Any, ...] = ()
    """First arguments of the operation, by which None chooses."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the comparison of one kernel found."""

    operation: str
    implementation: Implementation
    case: str = ""
    """Case of the operation; "" for the only one."""
    error: float | None
    """Largest difference over the norm of what it differs from; None where the kernel failed."""
    explanation: str = ""
    """Why it failed, or what differs most."""

    @property
    def is_right(self) -> bool:
        """Whether the kernel may be chosen."""
        return self.error is not None and self.error <= TOLERANCE

    def __str__(self) -> str:
        case = f" for {self.case}" if self.case else ""
        if self.error is None:
            return f"{self.operation}: {self.implementation} failed{case}: {self.explanation}"
        relation = "equals" if self.is_right else "differs from"
        return (
            f"{self.operation}: {self.implementation} {relation} the reference{case} (largest"
            f" difference {self.error:.2g} of the norm, of {self.explanation})"
        )


def _draw(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values / np.sqrt(shape[-1]), jnp.bfloat16)


def _attention(
    scale: int,
    *,
    length: int = 128,
    width: int = 64,
    window: int | None = None,
    packs: bool = False,
) -> Case:
    q, k, v = (_draw(i, 2, length * scale, heads, width) for i, heads in enumerate((4, 2, 2)))
    documents = jnp.asarray(np.arange(length * scale) // 100 + np.zeros((2, 1)), jnp.int32)
    segments = documents if packs else None

    def run(implementation: Implementation, *arrays: Any) -> Any:
        out, lse = flash_attention(
            *(width**0.5 * x for x in arrays),
            q_segment_ids=segments,
            kv_segment_ids=segments,
            window=window,
            implementation=implementation,
        )
        return out, jax.lax.stop_gradient(lse)

    rules = Rules.of("flash_attention", q, True, window, None, None)
    return Case(run, (q, k, v), (0, 1, 2), (q, k, v, Tokens(None, None, segments, segments), rules))


def _rows(scale: int) -> tuple[jax.Array, jax.Array]:
    """Return rows of which the last ones are not read, and the sizes of five groups."""
    sizes = scale * np.asarray([70, 0, 1, 120, 33])
    rows = _draw(3, 256 * scale, 128).at[int(sizes.sum()) :].set(jnp.nan)
    return rows, jnp.asarray(sizes, jnp.int32)


def _matmul(scale: int) -> Case:
    rows, sizes = _rows(scale)

    def run(implementation: Implementation, rows: Any, weights: Any, sizes: Any) -> Any:
        return grouped_matmul(rows, weights, sizes, implementation=implementation)

    return Case(run, (rows, _draw(4, 5, 128, 256), sizes), (0, 1))


def _outer(scale: int) -> Case:
    rows, sizes = _rows(scale)

    def run(implementation: Implementation, rows: Any, other_rows: Any, sizes: Any) -> Any:
        return grouped_outer(rows, other_rows, sizes, implementation=implementation)

    return Case(run, (rows, _draw(5, 256 * scale, 256), sizes), ())


def _swiglu(scale: int) -> Case:
    rows, sizes = _rows(scale)

    def run(implementation: Implementation, rows: Any, gate_up: Any, down: Any, sizes: Any) -> Any:
        return grouped_swiglu(8.0 * rows, gate_up, down, sizes, implementation=implementation)

    arrays = rows, _draw(6, 5, 128, 2, 256), _draw(7, 5, 256, 128), sizes
    return Case(run, arrays, (0, 1, 2))


def _quantize(scale: int) -> Case:
    w = quantize(_draw(8, 128, 256), "int8", axis=-2)

    def run(implementation: Implementation, x: Any) -> Any:
        return quantized_matmul(x, w, implementation=implementation)

    return Case(run, (_draw(9, 64 * scale, 128),), (0,))


def _pages(scale: int) -> Case:
    """Two singles and two pieces over pages in any order; what no query sees is large."""
    size = 16
    width = 4 * scale
    length = 24
    ends = np.asarray([1, 60 * scale, 64 * scale, 17])
    shape = (2, 4 * width, size, 2, 2, 128)
    rng = np.random.default_rng(10)
    table = rng.permutation(4 * width).reshape(4, width)
    pool = 11.0 * np.asarray(_draw(11, *shape), np.float32)
    for row, end in zip(table, ends, strict=True):
        tokens = pool[1, row].reshape(-1, *shape[3:])
        tokens[end:] = 1e4
        pool[1, row] = tokens.reshape(width, *shape[2:])
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

    arrays = _draw(12, 2 + 2 * length, 4, 128), jnp.asarray(pool, jnp.bfloat16)
    return Case(run, arrays, ())


CASES: Mapping[str, Mapping[str, Callable[[int], Case]]] = {
    "flash_attention": {
        "documents": functools.partial(_attention, packs=True),
        "whole": functools.partial(_attention, length=256, width=128),
        "window": functools.partial(_attention, length=256, width=128, window=70),
        "wide heads": functools.partial(_attention, width=256),
    },
    "grouped_matmul": {"": _matmul},
    "grouped_outer": {"": _outer},
    "grouped_swiglu": {"": _swiglu},
    "paged_attention": {"": _pages},
    "quantized_matmul": {"": _quantize},
}
"""The cases of each operation, by the factor on their smallest size."""


def choices_by_case(name: str, operation: Operation) -> dict[str, Choice]:
    """Return what None chooses here for each case of an operation; for "" without cases.

    Args:
        name: Name of the operation.
        operation: The operation.
    """
    cases = CASES.get(name, {})
    if not cases or not operation.depends_on_arguments():
        return {"": operation.choose(None)}
    return {case: operation.choose(None, *_case(name, case, 1).arguments) for case in cases}


def compare(
    name: str,
    implementation: Implementation,
    case: str | None = None,
    *,
    scales: Iterable[int] = (1, 3),
) -> Verdict:
    """Return whether an implementation computes what the reference does.

    Args:
        name: Operation with cases.
        implementation: Implementation that runs on the first device.
        case: Case of the operation; None is the first.
        scales: Factors on the sizes.
    """
    case = next(iter(CASES[name])) if case is None else case
    verdict = Verdict(operation=name, implementation=implementation, case=case, error=None)
    worst = 0.0
    worst_part = "the value"
    for scale in scales:
        prepared = _case(name, case, scale)
        try:
            actual = _compute(prepared, implementation, jax.local_devices()[0])
        except _FAILURES as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return dataclasses.replace(verdict, explanation=text[:200])
        expected = _compute(prepared, "reference", _host())
        for part, value in actual.items():
            error = _difference(value, expected[part])
            if not error <= worst:  # NaN is the worst
                worst = error
                worst_part = part
    error = worst if np.isfinite(worst) else float("inf")
    return dataclasses.replace(verdict, error=error, explanation=worst_part)


def prove(
    names: Iterable[str] = tuple(CASES),
    *,
    directory: str | os.PathLike[str] | None = None,
    scales: Iterable[int] = (3,),
    operations: Mapping[str, Operation] = OPERATIONS,
) -> list[Verdict]:
    """Compare the kernels that None chooses on the first device, and distrust those that differ.

    Args:
        names: Operations; those without a case, and cases for which None chooses no kernel, are
            left out.
        directory: Directory in which verdicts are kept; None compares anew.
        scales: Factors on the smallest sizes.
        operations: Operations by name.

    Returns:
        A verdict for each case and kernel that None chooses for it, until all that it chooses are
        right.
    """
    saved = _read(directory)
    scales = tuple(scales)
    cases = [
        (name, case, _case(name, case, 1).arguments)
        for name in names
        for case in CASES.get(name, {})
    ]
    verdicts: _Known = {}
    is_settled = False
    while not is_settled:  # a kernel that is dropped leaves its other cases to the next one
        choices: list[_Chosen] = []
        for name, case, arguments in cases:
            kernel = operations[name].choose(None, *arguments).implementation
            if kernel in KERNELS:
                choices.append((name, case, kernel))
        _compare_together(choices, saved, scales)
        verdicts |= {choice: saved[choice] for choice in choices}
        wrong: dict[tuple[str, Implementation], Verdict] = {}
        for choice in choices:
            if not saved[choice].is_right:
                wrong.setdefault((choice[0], choice[2]), saved[choice])
        for (name, kernel), verdict in wrong.items():
            distrust(name, kernel, str(verdict))
            warnings.warn(f"{verdict}; None no longer chooses it", stacklevel=2)
        is_settled = not wrong
    # What failed may have lacked memory: it is tried again by the next process.
    _write(directory, [choice for choice in saved.values() if choice.error is not None])
    return list(verdicts.values())


def _compare_together(
    choices: Iterable["_Chosen"], verdicts: "_Known", scales: tuple[int, ...]
) -> None:
    """Add the verdicts that are not known; kernels compile side by side."""
    new = [choice for choice in choices if choice not in verdicts]

    def judge(choice: "_Chosen") -> Verdict:
        name, case, implementation = choice
        return compare(name, implementation, case, scales=scales)

    with concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="proof") as pool:
        verdicts.update(zip(new, pool.map(judge, new), strict=True))


@functools.cache
def _host() -> jax.Device:
    """Return a device of the CPU, where the reference compiles at once; else the first device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names others alone
        return jax.local_devices()[0]


def _case(name: str, case: str, scale: int) -> Case:
    with jax.default_device(_host()):
        return CASES[name][case](scale)


def _compute(
    case: Case, implementation: Implementation, device: jax.Device
) -> dict[str, jax.Array]:
    """Return the value, and the gradient of a weighted sum by each array."""
    run = functools.partial(case.run, implementation)
    with_gradient = case.with_gradient

    def weigh(*arrays: Any) -> tuple[Any, Any]:
        values = jax.tree.leaves(run(*arrays))
        value = values[0]
        weights = jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
        return jnp.sum(value.astype(jnp.float32) * weights), values

    def both(*arrays: Any) -> tuple[Any, Any]:
        if not with_gradient:
            return jax.tree.leaves(run(*arrays)), ()
        (_, values), gradients = jax.value_and_grad(weigh, with_gradient, has_aux=True)(*arrays)
        return values, gradients

    arrays = jax.device_put(case.arrays, device)
    with jax.default_device(device):
        options = _WITHOUT_TUNING if device.platform == "gpu" else None
        compiled = jax.jit(both).lower(*arrays).compile(options)
        shapes = jax.tree.leaves((jax.eval_shape(both, *arrays), arrays))
        with _ALONE:
            floats = [x for x in shapes if jnp.issubdtype(x.dtype, jnp.inexact)]
            poison = [jax.device_put(np.full(x.shape, np.nan, x.dtype)) for x in floats]
            jax.block_until_ready(poison)
            del poison  # what a kernel does not write is now likely to be NaN
            values, gradients = jax.block_until_ready(compiled(*arrays))
    part_names = ("the value", *(f"result {place}" for place in range(1, len(values))))
    names = (f"the gradient of argument {place}" for place in with_gradient)
    return dict(zip((*part_names, *names), (*values, *gradients), strict=True))


def _difference(value: Any, expected: Any) -> float:
    value, expected = (np.asarray(x).astype(np.float64) for x in (value, expected))
    norm = max(float(np.linalg.norm(expected)), 1e-30)
    return float(np.linalg.norm(value - expected)) / norm


@functools.cache
def _key() -> str:
    """Return what verdicts depend on, as a name."""
    sources = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    version = jax.devices()[0].client.platform_version
    parts = (device_kind(), jax.__version__, version, sources.hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


_Chosen = tuple[str, str, Implementation]
"""Operation, case and implementation."""

_Known = dict[_Chosen, Verdict]


def _read(directory: str | os.PathLike[str] | None) -> _Known:
    if directory is None:
        return {}
    path = pathlib.Path(directory).expanduser() / f"kernels-{_key()}.json"
    try:
        verdicts = [Verdict(**row) for row in json.loads(path.read_text())]
        return {
            (verdict.operation, verdict.case, verdict.implementation): verdict
            for verdict in verdicts
        }
    except (OSError, ValueError, TypeError, KeyError):  # absent or damaged: compared anew
        return {}


def _write(directory: str | os.PathLike[str] | None, verdicts: Iterable[Verdict]) -> None:
    if directory is None:
        return
    folder = pathlib.Path(directory).expanduser()
    rows = [dataclasses.asdict(verdict) for verdict in verdicts]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"kernels-{_key()}.{os.getpid()}.part"
        part.write_text(json.dumps(rows))
        part.replace(folder / f"kernels-{_key()}.json")
    except OSError as error:
        warnings.warn(f"verdicts on kernels are not kept: {error}", stacklevel=2)
