"""Habits of the user's script that the runtime finds while it runs: how its loops commit, begin anew and add hooks."""
