# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe plan`: plans a mesh for devices that are not attached."""
