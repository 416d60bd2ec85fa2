# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names, for `jax.checkpoint`, what grouped_swiglu keeps for its backward pass beside arguments."""

HIDDEN = "grouped_swiglu_hidden"
"""Gate and up projection of the rows, before the activation; what else is needed follows."""
