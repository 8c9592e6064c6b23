"""A run on many processes: Ray, and only here; its loop is in run/.

driver/      the process that owns a run; the client's line to it; what Prometheus sees
  |
fleet/       stage actors: placed, wired, fed, and ended
  |
nodes/       machines and processes, and notices of their end
worker/      one stage actor
  |
transport/   channels between workers: TCP and Unix sockets, Ray's object store, gloo groups
"""
