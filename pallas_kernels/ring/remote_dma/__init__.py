# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""TPU kernels of the rings whose copies between devices are started by the computing kernels.

transfer       a kernel that sends parcels while it computes
blocks         attention over one block and its gradients, as such kernels, for any schedule
ring_keys      rotation of K and V in one kernel: two slots, and a capacity semaphore
ring_forward   the forward pass of a whole ring as one kernel
ring_backward  its gradients as one kernel
"""
