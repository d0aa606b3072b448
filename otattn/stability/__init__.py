"""How much attention stretched the distance between measures: one pair, or many."""

from otattn.stability import samplers
from otattn.stability.certify import Resolution
from otattn.stability.compression import CompressionBound, compress, compression_bound
from otattn.stability.layers import LayerMeasurements, measure_layers
from otattn.stability.ratio import StabilityRatio, stability_ratio
from otattn.stability.result import StabilityStudy
from otattn.stability.sample_complexity import SampleComplexity, sample_complexity
from otattn.stability.store import DirectoryStore, MemoryStore, Store
from otattn.stability.study import stability_study
from otattn.stability.sweep import Sweep, sweep

__all__ = [
    "CompressionBound",
    "DirectoryStore",
    "LayerMeasurements",
    "MemoryStore",
    "Resolution",
    "SampleComplexity",
    "StabilityRatio",
    "StabilityStudy",
    "Store",
    "Sweep",
    "compress",
    "compression_bound",
    "measure_layers",
    "sample_complexity",
    "samplers",
    "stability_ratio",
    "stability_study",
    "sweep",
]
