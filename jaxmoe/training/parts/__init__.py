# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Members of the socket `StepPart`: what a step does beside gradients, update and guard."""
