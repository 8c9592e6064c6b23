"""A run on many processes: Ray, and only here.

driver/     the process that owns a run; the client's line to it; what Prometheus sees
  |
workers/    stage actors: placed, wired, fed, and ended
  |
run/        the run as a loop over orders, its journal, lease and checkpoints: no Ray, the same for threads
  |
links/      channels between workers: TCP and Unix sockets, Ray's object store, gloo groups
"""
