"""``raypipe doctor``: what this machine and cluster can and cannot do, and the fix for what is missing.

ask.py  --a process of its own-->  cluster.py  --an actor per node-->  node.py
   |                                                                     |
   v                             facts as plain values                   |
checks.py  <-------------------------------------------------------------+
   |
   v
findings: ok | warning | problem, each with its fix
"""
