# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The tests of kernels that need an accelerator, in processes beside one another.

They run in a clone of the repository alone. References are computed without autotuning, which would
take longer than the tests.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from experiments.bench.accelerator.work import BenchWork, emit, run_part

_LINE = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")
_PLACE = "tests/pallas_kernels"
_PLUGINS = ("-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider")
"""Plugins that the tests need; others that happen to be installed warn, which is an error here."""


def suite(work: BenchWork) -> None:
    """Emit a row for each test that does not pass, and one with the counts."""
    seconds = float(work.options.get("seconds", 150))
    workers = int(work.options.get("workers", 4))
    row: dict[str, Any] = {"case": "tests of kernels", "name": "pytest -m accelerator"}
    if not os.path.isdir(_PLACE):
        emit(**row, error="there are no tests here: run in a clone of the repository")
        return
    command = [sys.executable, "-m", "pytest", "-m", "accelerator", "-v", "--tb=line", *_PLUGINS]
    command += [_PLACE, "-n", str(workers)]
    if work.is_tiny:
        command += ["-k", "largest_integers"]
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    environment = os.environ | {
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu" if work.is_tiny else "cuda,cpu"),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    started = time.monotonic()
    counts = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            match = _LINE.search(line)
            if match and "::" in line and line.startswith(("[gw", "tests/")):
                counts[match[1]] += 1
                if match[1] in ("FAILED", "ERROR"):
                    name = line.rsplit("::", 1)[1].strip()
                    emit(case="tests of kernels", name=name, error=match[1].lower())
            if time.monotonic() - started > seconds and "stopped" not in row:
                row["stopped"] = f"after {seconds:.0f} s"
                process.send_signal(signal.SIGINT)  # it then says why tests have failed
    seen = {"passed": counts["PASSED"], "failed": counts["FAILED"] + counts["ERROR"]}
    emit(**row, **seen, skipped=counts["SKIPPED"], seconds=round(time.monotonic() - started, 1))


if __name__ == "__main__":
    run_part(suite)
