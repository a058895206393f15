"""halfbyte."""
