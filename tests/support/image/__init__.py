"""A Debian system in a folder, in which the provisioning script runs for real."""
