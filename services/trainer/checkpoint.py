"""Checkpoints on disk: arrays and notes, whole or not at all; the newest few and the best few are kept.

Orbax copies the arrays to the host, writes them in the background to a temporary folder and renames that, so training
goes on meanwhile and a kill while saving leaves the previous checkpoint the newest.
Random numbers need no state: the order of tasks is a function of run.seed and the cursor, and the step draws none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from headrace.errors import StartupError
from services.trainer.model.decoder import Parameters
from services.trainer.train import TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Notes:
    """What a checkpoint tells besides its arrays."""

    # Steps done.
    step: int
    # Number of the next ticket.
    cursor: int
    # Version → updates before it, see lineage.py.
    positions: dict[int, int]
    # Entries that the arrays have learned from since the previous checkpoint: not acknowledged before this one exists.
    learned_ids: list[str]
    trained_groups: int


@dataclass(frozen=True)
class Restored:
    """A checkpoint in memory."""

    state: TrainState
    reference: Parameters | None
    critic: TrainState | None
    notes: Notes


class Checkpoints:
    """One run's folder of checkpoints. Blocking: not for the event loop."""

    def __init__(self, folder: Path, *, keep: int, keep_best: int = 0):
        """
        Args:
            keep: newest checkpoints that stay.
            keep_best: checkpoints of the highest reward that stay besides.
        """
        policies: list[managers.PreservationPolicy] = [managers.LatestN(keep)]
        if keep_best:
            policies.append(managers.BestN(get_metric_fn=lambda metrics: metrics["reward"], n=keep_best))
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies), create=True
            ),
        )

    @property
    def newest_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def begin_save(
        self,
        state: TrainState,
        reference: Parameters | None,
        notes: Notes,
        *,
        critic: TrainState | None = None,
        reward: float = 0.0,
    ) -> None:
        """Returns once the arrays may change; `settle` tells when it is durable. A step that has a checkpoint keeps it.

        Args:
            reward: what the best checkpoints are chosen by.
        """
        self.settle()
        if self.newest_step == notes.step:
            return
        arrays = {"state": state, "reference": reference, "critic": critic}
        items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items() if tree is not None}
        items["notes"] = ocp.args.JsonSave(_to_json(notes))
        self._manager.save(notes.step, args=ocp.args.Composite(**items), metrics={"reward": reward})

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._manager.is_saving_in_progress()

    def settle(self) -> None:
        """Returns once what was begun is durable. Raises what went wrong with it."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def restore(
        self,
        state: TrainState,
        *,
        with_reference: bool,
        critic: TrainState | None = None,
        step: int | None = None,
    ) -> Restored | None:
        """The newest checkpoint or that of `step`, laid out as `state`, and as `critic` if the run has one.

        Returns:
            None when there is no checkpoint yet.

        Raises:
            StartupError: it is of another model, cannot be read, or, with `step`, does not exist.
        """
        if step is None:
            step = self.newest_step
        elif step not in self._manager.all_steps():
            known = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise StartupError(
                f"there is no checkpoint of step {step} in {self._manager.directory}; there are: {known}"
            )
        if step is None:
            return None
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        items: dict[str, Any] = {"state": ocp.args.StandardRestore(shapes), "notes": ocp.args.JsonRestore()}
        if with_reference:
            items["reference"] = ocp.args.StandardRestore(shapes.parameters)
        if critic is not None:
            items["critic"] = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, critic))
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, OSError) as error:
            raise StartupError(
                f"checkpoint {step} in {self._manager.directory} cannot be restored ({_first_line(error)});"
                " was the model or the loss changed? set another run.id or remove the folder"
            ) from error
        log.info("restored the checkpoint of step %d", step)
        return Restored(
            restored["state"], restored.get("reference"), restored.get("critic"), _from_json(restored["notes"])
        )


def _to_json(notes: Notes) -> dict[str, Any]:
    return {
        "step": notes.step,
        "cursor": notes.cursor,
        "positions": [list(pair) for pair in notes.positions.items()],
        "learned_ids": notes.learned_ids,
        "trained_groups": notes.trained_groups,
    }


def _from_json(value: dict[str, Any]) -> Notes:
    return Notes(
        step=value["step"],
        cursor=value["cursor"],
        positions={version: position for version, position in value["positions"]},
        learned_ids=value["learned_ids"],
        trained_groups=value["trained_groups"],
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
