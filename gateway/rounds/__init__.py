"""The round loop's words and decisions: rounds, plans, the policy."""
