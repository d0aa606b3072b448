"""What well-posedness asks of a field: its size, its slope in the token, its slope in the measure with the token kept."""
