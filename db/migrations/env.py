"""Alembic runs this.

There is no alembic.ini: `db.migrate` hands over its connection, which is in a transaction already.
"""

from __future__ import annotations

from alembic import context

given = context.config.attributes
context.configure(
    connection=given["connection"],
    version_table=given["version_table"],
    transactional_ddl=True,  # SQLite can, though Alembic says no: Python's sqlite3 once committed before each statement
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
