# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans the traffic between hosts: their order, measured links, the congestion of a fabric.

host_order.py   order of the hosts in the mesh, for --processes.order
links.py        LinkTable: measured times, as links.json and as rates per mesh axis
fabric.py       flows of collectives on a leaf-spine network, and their congestion
measured.py     seconds of a step's messages by a links.json
page.py         NetworkConfig, and the lines of the plan
"""
