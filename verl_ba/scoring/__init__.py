"""Verifiable rewards: mathematics and code, one `compute_score` for verl."""
