# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Transport between TPUs by copies that the computing kernels start themselves.

transfer       a kernel that sends parcels while it computes; nothing but sending
blocks         attention over one block and its gradients, as such kernels, for any schedule
ring_keys      how K and V go round in one kernel: two slots, and a capacity semaphore
ring_forward   the forward pass of a whole ring as one kernel
ring_backward  its gradients as one kernel
"""
