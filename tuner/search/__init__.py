"""Chooses what to try next, and which configuration wins."""
