"""Requests from their checks to their last event, for every surface."""
