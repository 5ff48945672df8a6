"""Beam search as the gateway runs it: the record of a search, its sessions with draft and target, and its rounds."""
