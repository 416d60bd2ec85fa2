# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compilers of devices that are not attached.

topologies       finds the compiler of a topology, and the devices that it describes
described_gpus   what GPUs report of themselves
"""
