"""One generation's process group: gloo, NCCL, and the client of the bootstrap store that they use.

`script_lines.py` finds the lines of the user's script that an error names.
"""
