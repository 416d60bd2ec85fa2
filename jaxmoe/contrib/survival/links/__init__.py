# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the links between neighbours of a mesh, and locates slow devices and links.

faults.py   locate: from a matrix of times to slow devices and links
probe.py    LinkProbe: measures the matrix on the devices of a mesh
watch.py    LinkHook: measures during a run and reports what stays slow

The record of what was measured is `jaxmoe.planning.network.links.LinkTable`.
"""
