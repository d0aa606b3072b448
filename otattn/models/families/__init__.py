"""Tables of architectures."""
