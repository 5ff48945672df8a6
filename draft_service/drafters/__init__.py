"""Ways to guess, one file each."""
