"""Parts of the kit that decide and call nothing: error tables, listings, prices, machine types, quotas. Pure."""
