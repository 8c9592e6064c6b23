"""Nodes of the cluster: states of stage processes on a node, and notices that a node is about to be taken away."""
