"""Worker: the stage actor of one worker, with its stages, links, orders, copies of state, and heartbeat.

worker.py            the actor
   +-- orders.py       fence against replaced drivers, queue of orders, reports
   +-- loading.py      builds the state of its stages from tensors, checkpoints or copies
   +-- copies.py       in-memory copies of stages; copy_transfer.py sends and reads them
   +-- heartbeat.py    heartbeat, and the lease that a heartbeat request renews
"""
