"""Worker: the actor of one worker, with its stages, links, orders, in-memory copies of state, and heartbeat.

worker.py            the actor
   +-- orders.py       commands to run mini-batches: rejects those of replaced drivers, queues the others; reports
   +-- loading.py      builds the state of its stages from tensors, checkpoints or copies
   +-- copies.py       in-memory copies of stages; copy_transfer.py sends and reads them
   +-- heartbeat.py    heartbeat; ends the process if the driver sends no more heartbeat requests
"""
