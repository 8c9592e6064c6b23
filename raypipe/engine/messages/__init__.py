"""Messages between stages: the frame of a message, and the contract of every channel that carries one.

    tensors --frame.encode--> header | payload --channel--> header | payload --frame.decode--> tensors
              record.py         memory layout and record of a tensor
              checked_frame.py  checksums, on links between hosts

    channel.py     the contract of channels, the inbox for messages that arrived, and the in-memory channel
    transfer.py    copies between host memory and a device

The channels of a network are in runtime/transport/.
"""
