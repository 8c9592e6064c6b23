"""Devices that stages run on: CPUs, GPUs, and the threads that feed them."""
