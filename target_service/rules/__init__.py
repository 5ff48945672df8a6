"""Acceptance rules as pure functions of probabilities and uniforms, a module for each with its paper."""
