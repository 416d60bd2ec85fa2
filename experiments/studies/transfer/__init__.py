# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxmoe transfer`: sweeps the learning rate at several sizes."""
