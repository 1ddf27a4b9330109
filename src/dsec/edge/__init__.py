"""The edge: the daemon of one node. A pure state machine a sandbox, and the rim that performs what the machines order."""

from dsec.edge.build import build_edge
from dsec.edge.edge import Edge
from dsec.edge.settings import EdgeSettings

__all__ = ["Edge", "EdgeSettings", "build_edge"]
