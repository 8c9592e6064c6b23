"""Checks before a run trains.

They refuse models, losses, optimizers and data with which a pipeline would not compute what the user's module computes
on one device. Later layers do not repeat these checks.
"""
