"""OpenSSH for users and for the API's tunnel: keys, pinned host keys, config text, and the `ssh` process.

Only pinned keys (`model.SshAccess.host_keys`) are accepted, also on the jump host. No code here asks a person to trust
a key on first use.
"""
