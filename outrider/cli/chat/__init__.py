"""`outrider chat`: a conversation, turn by turn. Knows no protobuf; the whole conversation is sent again every turn."""
