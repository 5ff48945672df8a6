"""Drafters that read the target's own state: what a head is, what it computes, and the checkpoints that hold one."""
