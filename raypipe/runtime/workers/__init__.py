"""Stage actors, from start to stop.

    fleet.py  --places.py-->  worker.py         one actor per worker: its stages, links and segments
       |                        |
       |                     order_gate.py      where orders wait, and all stages can end after the same one
       v
    root_cause.py            which of several failures explains the others

``notices.py`` reads what a cloud announces to a machine, ``drains.py`` Ray's list of nodes that are about to go.
``packing.py`` carries parameters through Ray's object store as plain bytes, ``actor_outputs.py`` brings outputs back,
``allocator.py`` keeps freed memory in a stage's process.
"""
