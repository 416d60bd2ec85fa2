# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Changes of the mesh of a run while it trains."""
