"""Section `ssh` of the fleet file: its schema and values, its rules, and the machines as values."""
