"""Code of the commands, one module for each group."""
