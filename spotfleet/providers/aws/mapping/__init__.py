"""EC2's words and ours: names, tags, error codes, listings, launch templates, IAM policies. Pure."""
