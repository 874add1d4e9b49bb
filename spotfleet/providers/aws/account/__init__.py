"""Account resources of a fleet besides machines: network, identity, quotas, permissions, events."""
