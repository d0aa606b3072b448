"""The constant at one measure: its value, what it is for Gaussians, how it grows, and a proven value in one pass."""
