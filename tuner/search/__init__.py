"""What to try next, and which configuration won."""
