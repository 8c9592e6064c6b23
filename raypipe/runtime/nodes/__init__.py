"""Nodes of the cluster: states of the processes on them, notices that a node is about to go, and draining nodes."""
