"""Cloud accounts: their listings, the fleet that owns each machine or resource, and orphaned ones; a base that
Terraform made there (`base.py`); ready images (`images.py`)."""
