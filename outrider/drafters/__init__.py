"""How the draft guesses: all drafters work with the model of the service, each with noise of its own kind."""
