# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records a run: trackers, recorders of load, plots and the report.

Trackers receive the metrics during the run; plots and report are drawn from its files afterwards.
`import jaxmoe.tracking` needs no optional package: tensorboardX, matplotlib and others are imported
by the parts that use them. The paths of the files are defined in `jaxmoe/run/directory.py`.
"""

from jaxmoe.catalog import Registry
from pallas_kernels.public_names import load_when_used

load_when_used(__name__)

TRACKERS = Registry("tracker")
