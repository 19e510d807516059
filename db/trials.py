"""Optuna's storage, which adds an ended trial by a statement for each table.

Optuna's own sends three for each parameter, sixty in all: thirty milliseconds of processor time, in which no other
process can write. Before each of its trials a search also asks what others have added. Most often that is nothing, and
one statement finds that out, where Optuna sends seven.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session

if TYPE_CHECKING:
    from collections.abc import Container

    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.orm import Session

# Versions of Optuna's tables that fit this Optuna: to find out, it reads all its migrations, which takes longer than to
# open the database.
_FITTING: set[str] = set()


class TrialStorage(RDBStorage):
    """Optuna's storage, for studies whose trials are added when they have ended.

    A parameter's choices are not compared with those in earlier trials: a study's name has the space's hash.

    Args:
        url: Of the database.
        engine_kwargs: What SQLAlchemy is given beside it.

    Raises:
        RuntimeError: Its tables are of another version of Optuna.
    """

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        super().__init__(url, engine_kwargs, skip_compatibility_check=True)
        version = self.get_current_version()
        if version not in _FITTING:
            self._version_manager.check_table_schema_compatibility()
            _FITTING.add(version)

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        """Those that Optuna's cache in front of this has not read yet."""
        if not included_trial_ids:
            model = models.TrialModel
            later = sa.select(model.trial_id).where(model.study_id == study_id, model.trial_id > trial_id_greater_than)
            with _create_scoped_session(self.scoped_session) as session:
                if session.execute(later.limit(1)).first() is None:
                    return []
        return super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)

    def _get_prepared_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None, session: Session
    ) -> models.TrialModel:
        """What `create_new_trial` writes in its transaction, which holds the study's lock."""
        if template_trial is None or not template_trial.state.is_finished() or template_trial.system_attrs:
            return super()._get_prepared_new_trial(study_id, template_trial, session)
        trial = models.TrialModel(
            study_id=study_id,
            number=None,
            state=template_trial.state,
            datetime_start=template_trial.datetime_start,
            datetime_complete=template_trial.datetime_complete,
        )
        session.add(trial)
        session.flush()
        stored = [models.TrialValueModel.value_to_stored_repr(value) for value in template_trial.values or ()]
        rows: dict[type, list[dict[str, Any]]] = {
            models.TrialValueModel: [
                {"objective": objective, "value": value, "value_type": kind}
                for objective, (value, kind) in enumerate(stored)
            ],
            models.TrialParamModel: [
                {
                    "param_name": name,
                    "param_value": distribution.to_internal_repr(template_trial.params[name]),
                    "distribution_json": distribution_to_json(distribution),
                }
                for name, distribution in template_trial.distributions.items()
            ],
            models.TrialUserAttributeModel: [
                {"key": key, "value_json": json.dumps(value)} for key, value in template_trial.user_attrs.items()
            ],
        }
        for model, of_trial in rows.items():
            if of_trial:  # no objects are made, which would take longer than all else
                session.execute(sa.insert(model), [{"trial_id": trial.trial_id, **row} for row in of_trial])
        trial.number = trial.count_past_trials(session)
        return trial
