"""Worker runtime shared by all engines: connection to the agent, reports, assignments. Needs no torch."""
