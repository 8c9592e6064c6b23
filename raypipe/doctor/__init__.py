"""``raypipe doctor``: checks of this machine and a cluster, with a fix for every problem.

collect.py  --starts a process-->  collect.py as a program  --starts an actor per node-->  node.py
   |                                                                                     |
   v                               facts as plain values                                 |
checks.py  <-----------------------------------------------------------------------------+
   |
   v
findings: ok | warning | problem, each with its fix
"""
