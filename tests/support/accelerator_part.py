# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A part of `bench accelerator` that emits a row, then fails, hangs or ends, as it is told."""

import subprocess
import sys
import time

from experiments.bench.accelerator.work import emit, run_part


def part(work):
    """Emit a row and do what the option `fault` says."""
    print("a library talks")
    emit(case="planted", name=work.options.get("fault", "none"), phase=work.phase)
    fault = work.options.get("fault")
    if fault == "fails":
        raise RuntimeError("planted")
    if fault == "hangs":
        # A child that ignores the end of its parent ends with it too.
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=False)
    if fault == "dies":
        sys.exit(3)
    time.sleep(0.01)


if __name__ == "__main__":
    run_part(part)
