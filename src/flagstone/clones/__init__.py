"""Checkpoints, and the databases and states made of them: clones, projections, unions, restore and destruction."""
