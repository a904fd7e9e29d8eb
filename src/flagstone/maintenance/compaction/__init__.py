"""Merging tables into fewer: what to merge, who does it, and the work itself."""
