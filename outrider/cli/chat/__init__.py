"""`outrider chat`: a conversation, turn by turn; the whole conversation is sent again every turn."""
