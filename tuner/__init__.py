"""The search, and the command line over everything."""
