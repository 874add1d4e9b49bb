"""Access from the laptop: SSH to hosts, and watching a fleet for long (`watch.py`)."""
