# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.serve.simulation.cost import Roofline as Roofline
from jaxmoe.serve.simulation.measures import Measures as Measures
from jaxmoe.serve.simulation.measures import measure as measure
from jaxmoe.serve.simulation.run import Simulation as Simulation
from jaxmoe.serve.simulation.sizes import ModelSizes as ModelSizes
from jaxmoe.serve.simulation.workload import WORKLOADS as WORKLOADS
from jaxmoe.serve.simulation.workload import Arrival as Arrival
from jaxmoe.serve.simulation.workload import Workload as Workload
