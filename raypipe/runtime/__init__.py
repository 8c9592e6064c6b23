"""Runtime: runs the stages of a pipeline in Ray actors. Almost all use of Ray is here; the training loop is in run/.

driver/      the process that owns a run; the client's connection to it; metrics for Prometheus
  |
fleet/       starts stage actors, connects them, sends them work, replaces and ends them
  |
nodes/       states of processes on a node, and notices that a machine is about to go
worker/      the stage actor: process of one worker, with one or more stages
  |
transport/   channels between workers: TCP and Unix sockets, Ray's object store, gloo groups
"""
