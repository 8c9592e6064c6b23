"""Checks before a run starts, which refuse everything that cannot train exactly; later layers do not check it again."""
