"""The dispatcher's dealings with the provider: hosts, notices, outages, its own cost."""
