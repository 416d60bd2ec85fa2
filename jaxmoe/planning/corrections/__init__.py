# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Corrects closed forms by what was compiled or measured.

calibration.py  temporaries by number of layers, from two shallow models that were compiled
measured.py     efficiency of products, from a measured step
"""
