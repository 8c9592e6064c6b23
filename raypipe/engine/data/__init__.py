"""Training data: any samples of any epoch by their position, the same ones in every process that asks.

source.py          what every source does, and which one takes the user's data
  arrow_source.py    Parquet and Arrow files; columns.py makes arrays of their columns
  map_source.py      datasets with numbered items; loader.py takes a torch DataLoader apart
  stream_source.py   iterables; stream.py knows the place in one
epoch_order.py     which row stands where in an epoch
collate.py, stacking.py    items -> columns of a mini-batch
"""
