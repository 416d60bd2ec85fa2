# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the engine of `jaxmoe.serve` costs beside the device."""
