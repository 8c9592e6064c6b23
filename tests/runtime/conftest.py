"""Every Ray that these tests start asks for the same throw-away token."""

from __future__ import annotations

import os
import secrets

# Ray keeps the mode of the first session for the life of a process, and sets RAY_AUTH_MODE itself where nobody has:
# a session with a token before one without would leave its own actors unable to report to their owner.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
