"""The schema's history, one file a version.

Never change a file that was released; add the next one (0002, 0003, ...).
"""
