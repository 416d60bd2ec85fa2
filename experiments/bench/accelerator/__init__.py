# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe bench accelerator`: proves and measures everything on one accelerator."""
