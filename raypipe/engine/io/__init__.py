"""Files of a run: storage, metrics, events and checkpoints."""
