"""Stage actors, from start to stop.

    fleet.py  --places.py-->  worker.py         one actor per worker: its stages, links and segments
       |                        |
       |                     order_gate.py      where orders wait, and all stages can end after the same one
       +--watch.py---------> pulse.py          the heartbeat, and the lease that it renews
       |     +-------------> node_watch.py     what the kernel says of the processes of a node: processes.py
       v
    root_cause.py            which of several failures explains the others; endings.py: how a process ended, in words

``takeover.py`` takes living stages over from a driver that is gone: ``takeover_actor.py`` is their side of it,
``ledger.py`` what they were ordered, ``fence.py`` whom they obey.
``notices.py`` reads what a cloud announces to a machine, ``drains.py`` Ray's list of nodes that are about to go.
``packing.py`` carries parameters through Ray's object store as plain bytes, ``actor_outputs.py`` brings outputs back,
``allocator.py`` keeps freed memory in a stage's process. ``granted.py`` makes the device of a worker's share of a GPU,
``identity.py`` says what a worker is, and ``fitting.py`` has the first plan keep to the memory that the devices have.
"""
