"""Schedules on paper: rows of actions and the seconds of each in, a Timeline out.

serial.py    action by action, with links that carry one message at a time
wide.py      the same times for long programs, all workers one step at once in arrays
"""
