"""One Alembic revision a file."""
