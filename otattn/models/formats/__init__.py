"""Files of weights, a module each."""
