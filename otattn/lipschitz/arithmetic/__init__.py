"""Numbers that carry their error: outward intervals in numpy, balls of python-flint, margins for floats."""
