"""Scripts that measure otattn side by side with what people would use instead; results under ``benchmarks/results``."""
