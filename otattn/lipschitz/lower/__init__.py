"""Lower bounds: measures that attain them, and the searches that find those."""
