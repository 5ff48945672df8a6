"""The draft service rides ahead: it guesses what the target will say."""
