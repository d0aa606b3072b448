"""Theorems for logits whose form A has a given shape: what holds for every A is in :mod:`otattn.lipschitz.upper`."""
