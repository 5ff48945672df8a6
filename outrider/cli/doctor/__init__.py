"""`outrider doctor`: looks at this machine, at a pair of models, or at a running gateway, and says what to change."""
