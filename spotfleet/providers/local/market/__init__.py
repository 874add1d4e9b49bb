"""The emulated spot market: pools, prices, refusals, notices, invoice. Pure."""
