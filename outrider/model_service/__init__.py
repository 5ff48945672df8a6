"""What draft and target service have in common."""
