"""Verifies and times candidates, in a GPU process that may be killed, and its client."""
