"""How two workers are joined: three transports behind one channel contract (engine/messages/channel.py).

    opening.py                which transport; an Endpoint (endpoint.py) for each worker
      +-- tcp.py              connections of our own: listener.py, handshake.py, socket_channel.py, again.py,
      |                       congestion.py
      +-- object_store.py     objects in Ray's store: object_store_channel.py, window.py
      +-- collective.py       gloo groups of two: collective_channel.py, forecast.py

``queued_channel.py`` is the sending thread that they share, ``landing.py`` the memory that messages are received into,
``addresses.py`` where a worker listens, ``probe.py`` measures links while nothing trains.
"""
