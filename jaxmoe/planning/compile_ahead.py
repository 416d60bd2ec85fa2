# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles a train step for devices that are not attached, and reads memory and traffic off it.

    devices    of a TPU topology from libtpu (extra [plan]), GPUs described to the CUDA plugin
               (extra [cuda]), or fake ones of this machine's CPU
    memory     of one device, reported by the compiler: arguments, results, temporaries
    traffic    the collectives of the compiled text, by mesh axes
    kernels    of a GPU, by kind: bytes and FLOPs

A process can load libtpu once, and its start-up reads the environment and writes to standard error:
call this in a separate process (`in_child`) with the environment of `child_environment`.

To add a figure of a compiled program: `CompiledProgram` in `jaxmoe/planning/compile_ahead.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxmoe.planning.abstract_step import StepPlan, trace_step
from jaxmoe.planning.compilers.topologies import topology_devices
from jaxmoe.planning.device_bytes import device_bytes
from jaxmoe.planning.hardware import Topology
from jaxmoe.planning.hlo import KernelTraffic, ProgramWork, collectives, kernel_traffic, work
from jaxmoe.planning.mesh_axes import AxisBytes, bytes_by_axes
from jaxmoe.planning.sizes import Sizes
from sharding.mesh import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """Figures of a compiled program; bytes on one device."""

    seconds: float
    """Time to trace, lower and compile."""
    arguments: int
    results: int
    aliased: int
    """Results stored in the memory of arguments."""
    temporaries: int
    """XLA's figure, which for TPUs holds some arguments a second time."""
    allocated: int | None
    """Bytes that the program allocates, all included, if this jaxlib reports them."""
    peak: int | None
    """Most bytes alive at once, if this jaxlib reports them."""
    flops: float | None
    """FLOPs by the cost analysis, which counts the body of a loop once."""
    bytes_accessed: float | None
    """Bytes read and written by the same analysis."""
    traffic: list[AxisBytes] | None
    """None if this jaxlib cannot parse the program (v5p with a newer libtpu)."""
    work: ProgramWork | None
    """FLOPs and bytes with loops counted; None as `traffic`."""

    @property
    def total(self) -> int:
        """Arguments, results that are not aliased, and temporaries."""
        return self.arguments + self.results - self.aliased + self.temporaries

    @classmethod
    def of(cls, compiled: Any, mesh: Mapping[str, int], seconds: float) -> CompiledProgram:
        """Return the figures of a program.

        Args:
            compiled: `jax.stages.Compiled`.
            mesh: Size by axis, in the order of the devices.
            seconds: Time that it took.
        """
        memory = compiled.memory_analysis()
        costs = compiled.cost_analysis() or {}
        text = _text(compiled)
        return cls(
            seconds=seconds,
            arguments=int(memory.argument_size_in_bytes),
            results=int(memory.output_size_in_bytes),
            aliased=int(memory.alias_size_in_bytes),
            temporaries=int(memory.temp_size_in_bytes),
            allocated=getattr(memory, "total_allocation_bytes", None) or None,
            peak=getattr(memory, "peak_memory_in_bytes", None) or None,
            flops=costs.get("flops"),
            bytes_accessed=costs.get("bytes accessed"),
            traffic=None if text is None else bytes_by_axes(collectives(text), mesh),
            work=None if text is None else work(text),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStep(CompiledProgram):
    """Figures of a compiled step."""

    expected_results: int
    """Closed form: `device_bytes` of the results and the table of their addresses."""
    kernels: list[KernelTraffic] | None = None
    """Kernels by kind, on a GPU."""


_SIZES = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DoesNotFit:
    """A step that the compiler refused for lack of memory."""

    needed: float | None
    """Bytes needed, if the compiler reports them."""
    available: float | None
    text: str
    """First line of the compiler's error."""

    @classmethod
    def of(cls, error: Exception) -> DoesNotFit:
        """Return what the compiler's error says; another error is raised again.

        Args:
            error: Error of a compilation.
        """
        text = str(error)
        if not is_for_memory(error):
            raise error
        match = _SIZES.search(text)
        need, limit = (
            (float(match[1]) * _UNITS[match[2]], float(match[3]) * _UNITS[match[4]])
            if match
            else (None, None)
        )
        line = next((line for line in text.splitlines() if "Used" in line), text.splitlines()[0])
        return cls(needed=need, available=limit, text=line.strip()[:300])


def is_for_memory(error: Exception) -> bool:
    """Return whether an error of a compilation says that memory is short."""
    return "RESOURCE_EXHAUSTED" in str(error)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompilerRefusal:
    """A step that cannot be traced, lowered or compiled for the devices, for another reason than
    memory."""

    text: str
    """First line of the error."""

    @classmethod
    def of(cls, error: Exception) -> CompilerRefusal:
        """Return what an error says, or its name where it says nothing."""
        lines = str(error).strip().splitlines()
        return cls(text=f"refused: {lines[0].strip()[:300] if lines else type(error).__name__}")


class CompilerCrashError(RuntimeError):
    """A process that compiles was ended by a signal, as failed checks of a compiler do."""


def child_environment(topology: Topology) -> dict[str, str]:
    """Return the environment of a process that compiles for a topology."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if topology.chip.platform == "cpu":
        flags = re.sub(
            r"--xla_force_host_platform_device_count=\d+", "", environment.get("XLA_FLAGS", "")
        )
        count = f"--xla_force_host_platform_device_count={topology.num_devices}"
        environment["XLA_FLAGS"] = f"{flags} {count}".strip()
    elif topology.chip.platform == "gpu":
        environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    else:
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",  # do not wait for a metadata server
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other plans may run at the same time
            "TPU_ACCELERATOR_TYPE": f"{topology.kind}-{topology.num_devices}",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
    return environment


def in_child(
    module: str,
    job: dict[str, Any],
    topology: Topology,
    *,
    on_wait: Callable[[float, str], object] | None = None,
    seconds: float = 15.0,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Return the result of `python -m module FILE` on a job, in a separate process.

    Args:
        module: Module that reads the job from `FILE` and writes `FILE.result`, both JSON.
        job: Contents of `FILE`.
        topology: Topology that decides the environment of the process.
        on_wait: Called while the process runs, with the seconds so far and its phase, the contents
            of `FILE.phase`.
        seconds: Seconds between the calls of `on_wait`.
        python: Interpreter of the process.

    Returns:
        Contents of `FILE.result`. The output of the process is discarded unless it fails.

    Raises:
        CompilerCrashError: A signal ended the process; holds the end of its output.
        RuntimeError: The process failed; holds the end of its output.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = os.path.join(directory, "job.json")
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(job, stream)
        started = time.perf_counter()
        environment = child_environment(topology)
        if python != sys.executable:
            environment = _for_other_python(environment)
        with subprocess.Popen(
            [python, "-m", module, file],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            output = errors = None
            try:
                while output is None:
                    try:
                        output, errors = child.communicate(timeout=seconds)
                    except subprocess.TimeoutExpired:
                        if on_wait is not None:
                            on_wait(time.perf_counter() - started, _phase(file))
            finally:
                child.kill()  # after an interrupt
        if child.returncode:
            last = "\n".join((errors or output or "").strip().splitlines()[-15:])
            kind = CompilerCrashError if child.returncode < 0 else RuntimeError
            raise kind(f"{module} ended with {child.returncode}:\n{last}")
        with open(f"{file}.result", encoding="utf-8") as stream:
            return json.load(stream)


def _for_other_python(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which another Python finds this library and its own libtpu.

    Importing libtpu sets TPU_LIBRARY_PATH for the children too; a path set by a user stays.
    """
    paths = (str(pathlib.Path(__file__).parents[2]), environment.get("PYTHONPATH", ""))
    changed = environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    spec = importlib.util.find_spec("libtpu")
    if spec is not None and spec.origin is not None:
        library = os.path.join(os.path.dirname(spec.origin), "libtpu.so")
        if changed.get("TPU_LIBRARY_PATH") == library:
            del changed["TPU_LIBRARY_PATH"]
    return changed


def _phase(file: str) -> str:
    """Return the phase that a child process has written last."""
    try:
        with open(f"{file}.phase", encoding="utf-8") as stream:
            return stream.read() or "starting"
    except OSError:
        return "starting"


def topology_mesh(plan: StepPlan, topology: Topology) -> Mesh:
    """Return the plan's mesh on the devices of a topology.

    Args:
        plan: Step to compile.
        topology: Topology with as many devices as the mesh.
    """
    return make_mesh(plan.execution.mesh, topology_devices(topology), fold=plan.execution.mesh_fold)


def compile_step(
    plan: StepPlan,
    topology: Topology,
    *,
    on_phase: Callable[[str], object] = len,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledStep | DoesNotFit | CompilerRefusal:
    """Compile the train step of a plan for a topology.

    Args:
        plan: Step to compile.
        topology: Topology with as many devices as the plan's mesh.
        on_phase: Called with a description of each phase when it begins.
        compiler_options: Options of XLA, those that a run compiles its step with.

    Raises:
        ValueError: The compiler does not know the topology.
    """
    started = time.perf_counter()
    on_phase("loading the compiler")
    mesh = topology_mesh(plan, topology)
    try:
        on_phase("tracing the step")
        traced = trace_step(plan, mesh)
        on_phase("lowering the step")
        is_gpu = topology.chip.platform == "gpu"
        lowered = traced.lower(lowering_platforms=("cuda",) if is_gpu else None)
        on_phase("compiling with XLA")
        compiled = lowered.compile(compiler_options=dict(compiler_options or {}) or None)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return DoesNotFit.of(error) if is_for_memory(error) else CompilerRefusal.of(error)
    seconds = time.perf_counter() - started
    on_phase("reading the compiled program")
    program = CompiledProgram.of(compiled, dict(mesh.shape), seconds)
    figures = {
        field.name: getattr(program, field.name) for field in dataclasses.fields(CompiledProgram)
    }
    text = _text(compiled) if is_gpu else None
    rows = Sizes.of(plan).balanced_rows()
    return CompiledStep(
        **figures,
        expected_results=result_bytes(traced.out_info, topology),
        kernels=None if text is None else kernel_traffic(text, balanced_rows=rows),
    )


def _text(compiled: Any) -> str | None:
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:  # jaxlib cannot parse the program of a newer libtpu
        return None


def result_bytes(results: Any, topology: Topology) -> int:
    """Return the bytes of a step's results on one device and of the table of their addresses.

    Args:
        results: Shapes with shardings; metrics without one are replicated.
        topology: Topology with the layouts.
    """
    platform = topology.chip.platform
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_find_known(leaf))
        for leaf in jax.tree.leaves(results)
    ]
    if platform in ("cpu", "gpu"):
        table = 8 * len(leaves)
    else:
        unit = 32 if topology.chip.torus == 3 else 512  # observed on v5p and v5e
        table = -(-4 * len(leaves) // unit) * unit
    return device_bytes(leaves, platform) + table


def _find_known(leaf: Any) -> Any:
    return leaf.sharding if hasattr(leaf.sharding, "spec") else None
