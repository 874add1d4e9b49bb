"""One run of an executor: its coordinator, its actors and the loop between them. Map: `spotfleet/ray/__init__.py`."""
