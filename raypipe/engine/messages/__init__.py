"""What stages send each other: the frame of a message, and what every channel that carries one must do.

    tensors --frame.encode--> header | payload --channel--> header | payload --frame.decode--> tensors
              record.py         one record a tensor                          layout.py: strides over raw bytes
              checked_frame.py  checksums, on links between hosts
              device_frame.py   the payload stays on a GPU

    channel.py    what every channel does; inbox.py is where messages wait for the executor

The channels of a network are in runtime/links/, that between two workers of one process is memory_channel.py.
"""
