"""A host that does nothing until it is told to end."""

import signal

signal.pause()
