# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Corrects closed forms by what was compiled or measured.

calibration.py  temporaries of a deep model, from a shallower one that was compiled
measured.py     efficiency of products, from a measured step
"""
