"""Parts that the draft and the target service share."""
