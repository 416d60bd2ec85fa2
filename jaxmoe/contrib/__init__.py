# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Methods of low demand, one file each, reached by the catalogue alone."""
