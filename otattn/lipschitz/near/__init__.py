"""What a map does near given tokens: its Jacobian there, and how fast that changes."""
