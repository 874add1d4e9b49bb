"""The tests of spotfleet. `CONTRIBUTING.md` says how to run them."""
