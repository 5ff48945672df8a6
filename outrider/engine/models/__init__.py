"""Models from their files to a decoder in memory."""
