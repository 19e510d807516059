"""What was built, checked and timed, and which won.

``records`` and ``errors`` load no database library; ``store`` comes with SQLAlchemy.
"""
