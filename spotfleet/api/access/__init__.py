"""SSH access to hosts from the laptop."""
