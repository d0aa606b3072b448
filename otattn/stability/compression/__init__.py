"""Measures of few atoms in place of larger ones, and what attention loses by it."""

from otattn.stability.compression.bound import CompressionBound, compression_bound
from otattn.stability.compression.compress import compress

__all__ = ["CompressionBound", "compress", "compression_bound"]
