"""Costs that plans are compared by: seconds of a stage, bytes of a worker."""
