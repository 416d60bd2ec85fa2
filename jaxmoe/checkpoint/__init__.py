# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Saves and restores checkpoints: state, config and data position in one commit, on any mesh.

`from_huggingface` and `to_huggingface` exchange weights with `transformers`.
"""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
