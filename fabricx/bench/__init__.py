"""Measurements of the engine beside the limit and beside others: `fabricx bench p2p`."""
