"""Cloud accounts: their listings, the fleet that owns each machine or resource, and orphaned ones."""
