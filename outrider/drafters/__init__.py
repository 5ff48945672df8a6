"""Drafters that guess with the model of the service, each with noise of its own kind."""
