"""OpenSSH for people and for the API's tunnel: keys, pinned host keys, config text, and the `ssh` that runs.

Only keys that are pinned (`model.SshDoor.host_keys`) are accepted, also on the way through the jump host; nothing here
ever asks a person to trust a key at first sight.
"""
