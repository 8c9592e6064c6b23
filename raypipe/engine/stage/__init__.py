"""One stage: its module, its forwards and backwards, what it keeps for them, and its weight versions."""
