"""Claims on configurations in the database, so that two searches of one problem measure nothing twice."""

from __future__ import annotations

import hashlib
import os
import platform
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from ...db.errors import DatabaseError
from ...db.records import Holder
from ...db.rows import config_name
from ...gen.families import FAMILIES, Config
from ...gen.render import template_hash
from .patience import Patience

if TYPE_CHECKING:
    from ...db.store import Store

LIFETIME_S = 600.0
"""After so long without a sign of life what a search has claimed is free. Longer than a candidate takes at the most,
and than clocks of hosts differ."""

_RENEWED_EVERY_S = LIFETIME_S / 5
_SCALE = "the first time"


class Claims:
    """The claims of one search.

    Args:
        store: The database.
        study: The name of the study.
        conditions: What a time depends on besides the configuration.
        patience: Repeats what a server refuses while it restarts.
    """

    def __init__(self, store: Store, study: str, conditions: str, patience: Patience) -> None:
        self._store, self._patience = store, patience
        templates = [template_hash(family) for family in FAMILIES]  # results of others are not read back either
        self._scope = hashlib.sha256("\0".join([study, conditions, *templates]).encode()).hexdigest()
        self._holder = Holder(uuid.uuid4().hex, platform.node(), os.getpid())
        self._renewed = time.monotonic()

    def take(self, config: Config) -> bool:
        """Claims a configuration; False where another search has it.

        It stays claimed to the end of the search: who asks for it later finds its result in the study.
        """
        return self._take(config_name(config))

    def take_scale(self) -> bool:
        """Claims to time the first candidate of all, which sets the scale of costs; False where another search does."""
        return self._take(_SCALE)

    def give_up(self) -> None:
        """Gives up all of them. Where the database is lost, they expire."""
        with suppress(DatabaseError):
            self._store.release(self._scope, self._holder)

    def _take(self, subject: str) -> bool:
        now = time.monotonic()
        if now - self._renewed > _RENEWED_EVERY_S:
            self._patience(lambda: self._store.renew(self._scope, self._holder, LIFETIME_S))
            self._renewed = now
        return self._patience(lambda: self._store.claim(self._scope, subject, self._holder, LIFETIME_S))
