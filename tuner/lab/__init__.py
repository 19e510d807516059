"""Candidates are verified and timed: a GPU process that may be killed, and its client."""
