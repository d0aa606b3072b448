"""The sample layer that comes with the package, and readers for a user's own layer."""

from otattn.data.layer import SampleLayer, load_layer
from otattn.data.sample import load_excerpt, load_sample

__all__ = ["SampleLayer", "load_excerpt", "load_layer", "load_sample"]
