"""otattn: how stable attention is in the geometry of optimal transport."""
