"""GCP: its price list, for the catalog. The provider itself is not written yet."""
