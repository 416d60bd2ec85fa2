# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selection biases: numbers added to the scores for the choice of the K best experts.

To add a bias: a file in `jaxmoe/routing/biases/` with its config (see `base.SelectionBias`), its
row under `bias` in `jaxmoe/catalog/layers.py`, a row in BIAS_CASES of
`tests/jaxmoe/routing/test_biases.py`.
"""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
