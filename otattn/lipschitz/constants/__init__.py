"""The constants of the theory, one module each, in float64 and in exact arithmetic, with the certificates that prove them."""
