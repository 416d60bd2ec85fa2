# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.plan`: plans a mesh for devices that are not attached."""
