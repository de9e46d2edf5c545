"""The directory of a run: checkpoints, reference policy and configuration, and how a run resumes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

try:  # ten times as fast, where PyYAML was built with libyaml
    from yaml import CSafeDumper as _Dumper
    from yaml import CSafeLoader as _Loader
except ImportError:
    from yaml import SafeDumper as _Dumper  # type: ignore[assignment]
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

from multitask_rl.boundary.printable import counted, cut_off, redact
from multitask_rl.config.run import CheckpointConfig, RunConfig, dotted
from multitask_rl.config.task import TaskSpec
from multitask_rl.errors import CheckpointError, ConfigError, TrainingError, disk_errors
from multitask_rl.models.actor import Actor, copy_weights, fit_weights, read_weights
from multitask_rl.plugins import class_id, source_file
from multitask_rl.records import Event
from multitask_rl.run.checkpoint import Checkpoint, CheckpointEntry, CheckpointStore, telling_of_removal
from multitask_rl.run.directory_lock import DirectoryLock
from multitask_rl.run.manifest import check_files, read_manifest, write_manifest
from multitask_rl.run.state import RunState
from multitask_rl.tracking.jsonl import RECORDS, cut_records, record_lengths, set_records_aside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_MAY_DIFFER = (
    *("max_steps", "output_dir", "num_threads", "profile", "checkpoint.resume"),
    *("tracking.console", "tracking.uri"),
)
"""Settings of length, place, start and display; a change of one does not change the training itself."""
_FREE = re.compile(
    r"^tasks\.([^.]+)\.(?:\w+_config|select|chat_template_kwargs)\."
    r"|^(?!tasks\.)[^.]+\.\w+_config\.|^device_map\.|^model\.rope_scaling\."
)
"""Keys whose names the user chooses: one that was added or removed counts as a change. Any other key that
only one side has comes from another version of this package, and does not count."""
_ENTRIES = re.compile(r"^tasks\.[^.]+\.(?:rewards|constraints)$")
"""Keys of lists of entries."""

RUN = ""
"""The run itself, in place of a task's name."""


class PluginCode:
    """Files of plugins: were they edited while the run goes on, or since?

    They are of the tasks, and with ``config`` of the scheduler's policy and the guard.
    """

    def __init__(self, specs: Mapping[str, TaskSpec], config: RunConfig | None = None) -> None:
        named: dict[str, dict[str, str]] = {}
        if config is not None:
            named[RUN] = {"scheduler.policy": config.scheduler.policy}
            named[RUN] |= {"guard.plugin": config.guard.plugin} if config.guard.enabled else {}
        for name, spec in specs.items():
            named[name] = {f"rewards.{r.name}": r.plugin for r in spec.rewards}
            named[name] |= {f"constraints.{c.name}": c.plugin for c in spec.constraints}
            named[name] |= {"environment": spec.environment, "type": spec.type}
        self._files: dict[str, dict[str, Path]] = {}
        for name, references in named.items():
            found = ((what, source_file(reference)) for what, reference in references.items())
            self._files[name] = {what: file for what, file in found if file is not None}
        self.versions: dict[str, dict[str, str]] = {name: {} for name in named}
        """Task, or ``RUN`` -> plugin -> hash of its file, as it was at the last call of ``edited``."""
        self.edited()

    def edited(self) -> list[str]:
        """Return the plugins whose file was edited since the last call: place in the settings, and file."""
        found = []
        for name, files in self._files.items():
            for what, file in files.items():
                with suppress(OSError):  # it is being replaced, or was moved: the next call sees what comes
                    version = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
                    if self.versions[name].setdefault(what, version) != version:
                        found.append(f"{place_of(name, what)} ({file.name})")
                        self.versions[name][what] = version
        return found


def place_of(name: str, what: str) -> str:
    """Return the place in the settings of the plugin ``what`` of a task or of ``RUN``."""
    return what if name == RUN else f"tasks.{name}.{what}"


class RunStore:
    """Checkpoints of one run and the reference policy beside them.

    With ``track`` the run locks the directory and writes to it; otherwise it only reads, but makes
    ``checkpoints/``.

    Raises:
        ConfigError: another process trains into the directory.
        CheckpointError: the directory cannot be written, or the checkpoint to resume from cannot be read.
    """

    def __init__(self, output_dir: Path, config: CheckpointConfig, *, track: bool = True) -> None:
        self._output_dir = output_dir
        self._track = track
        with disk_errors(str(output_dir)):
            self._lock = DirectoryLock(output_dir) if track else None
        directory = output_dir / "checkpoints"
        try:
            if track and config.resume == "never" and any(directory.glob("step_*")):
                number = 1
                while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
                    number += 1
                try:
                    directory.rename(aside)
                except OSError as error:
                    raise CheckpointError(
                        f"cannot set aside what a former run left in {directory}: {error}; choose another "
                        "output_dir"
                    ) from error
                logger.info("a new run begins: the checkpoints of a former run are now in %s", aside)
            with disk_errors(str(directory)):
                directory.mkdir(parents=True, exist_ok=True)
            self.checkpoints = CheckpointStore(directory, config.keep, is_writer=track)
            self._found: Checkpoint | None = None
            if config.resume == "auto":
                self._found = self.checkpoints.newest()
            elif config.resume != "never":
                self._found = self.checkpoints.load(Path(config.resume))
        except BaseException:
            self.close()
            raise
        self.reference_dir = output_dir / "reference"
        """Weights of the reference policy at the start of the run, if it has one."""
        self._owner = output_dir
        """Directory of the run that made the checkpoint to resume; ``output_dir`` without a checkpoint.

        For a checkpoint outside of a directory ``checkpoints`` (a copy), it is the directory that the
        checkpoint lies in: ``output_dir`` may hold files of another run.
        """
        if self._found is not None:
            beside = self._found.path.resolve().parent
            self._owner = beside.parent if beside.name == "checkpoints" else beside
        self.restored: Path | None = None
        """The checkpoint that the run resumed from."""
        self.resumed_at: int | None = None
        """The step from which the run continues its own records; None: they begin anew."""
        self.forked: CheckpointEntry | None = None
        """Entry of another run's checkpoint, if this run began from it."""
        self.has_other_guard = False
        """The checkpoint's guard was of another class than this run's."""
        self._recorded: set[str] = set()
        """Record files that existed at the last check."""
        self.events: list[Event] = []
        """Events of the resume."""
        self.code = PluginCode({})
        """Files of the run's plugins, from ``resume`` on."""

    def close(self) -> None:
        """Unlock the directory. Idempotent."""
        if self._lock is not None:
            self._lock.release()

    def check(self) -> None:
        """Check that the directory is this run's, and that it and its record files still exist.

        Raises:
            CheckpointError: one was deleted or replaced, or a later run of this process has the directory.
        """
        self._check_owned()
        there = {name for name in RECORDS if (self._output_dir / name).exists()}
        if self._lock is not None and self._lock.is_lost():
            lost = f"output_dir {str(self._output_dir)!r}"
        elif self._recorded - there:
            lost = str(self._output_dir / min(self._recorded - there))
        else:
            self._recorded = there
            return
        raise CheckpointError(
            f"{lost} was deleted or replaced while the run writes it: records are lost. The weights are "
            "saved; start again: the run goes on from them"
        )

    @property
    def is_taken(self) -> bool:
        """Whether a later run of this process has the directory."""
        return self._lock is not None and self._lock.is_taken

    def _check_owned(self) -> None:
        if self.is_taken:
            raise CheckpointError(
                f"output_dir {str(self._output_dir)!r}: a later run of this process trains into it, and this "
                "one writes there no more; go on with that run, or make a new one in another output_dir"
            )

    def restore_control_tokens(self, actor: Actor) -> None:
        """Give ``actor`` the control tokens of the checkpoint. Before any part that depends on their number.

        Raises:
            CheckpointError: they belong to another model, or the checkpoint was removed meanwhile.
        """
        if self._found is not None:
            with telling_of_removal(self._found.path):
                actor.keep_control_tokens(self._found.actor_dir)

    def reference(self, actor: Actor, *, follows: bool = False) -> PreTrainedModel | None:
        """Return the frozen reference policy: the actor at the start of the run, kept for resumed runs.

        A fork has that of the run whose checkpoint it begins from. None with adapters: the base model is the
        reference. With ``follows`` (``model.reference_decay`` below 1) ``resume`` restores the reference from
        the checkpoint, if the checkpoint has one. The directory ``reference`` may then be missing.

        Raises:
            CheckpointError: it is damaged, cannot be written, or is missing and ``actor`` has been trained.
        """
        directory = self.reference_dir
        reference = actor.clone_for_reference()
        if reference is None:
            return None
        is_own = self._owner.resolve() == self._output_dir.resolve()  # else it may be of a former run there
        known = self._owner / directory.name
        is_known = self._found is not None and known.is_dir()
        if is_known:
            try:
                check_files(known, read_manifest(known))
            except CheckpointError as error:
                raise CheckpointError(
                    f"the reference policy, against which the KL is measured, is damaged: {error}. Copy "
                    f"{known} back from elsewhere; or delete it, then it is made anew from "
                    "model.name_or_path"
                ) from error
            copy_weights(reference, fit_weights(reference, read_weights(known, reference)))
        elif self._found is not None and actor.policy_version:
            if follows and any(name.startswith("reference/") for name in self._found.tensors):
                return reference
            raise CheckpointError(
                f"{self._owner} keeps no reference policy, and the actor given in Python has made "
                f"{actor.policy_version} steps, so that the KL would not be to the weights that the run "
                "began with; give a model that holds these"
            )
        if self._track and not (is_known and is_own):
            aside = directory.with_name(f".writing_{directory.name}")
            try:
                with disk_errors(f"the reference policy {directory}"):
                    shutil.rmtree(aside, ignore_errors=True)
                    reference.save_pretrained(aside, safe_serialization=True)
                    write_manifest(aside)
                    shutil.rmtree(directory, ignore_errors=True)
                    os.replace(aside, directory)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
        return reference

    def resume(self, state: RunState, config: RunConfig, specs: Mapping[str, TaskSpec]) -> str | None:
        """Restore the checkpoint, if any; return the trackers' identity if it belongs to this run.

        A run that resumes itself drops its records after the checkpoint; other records are set aside.

        Raises:
            ConfigError: the run was made with another model, of the actor or of the critic.
            CheckpointError: the checkpoint holds what cannot be read, or the directory cannot be written.
        """
        track, found, progress, guard = self._track, self._found, state.progress, state.guard
        self.code = PluginCode(specs, config)
        if found is None:
            if track:
                # an unreadable checkpoint would count as the newest of the new run
                self.checkpoints.set_aside_after(-1)
                set_records_aside(self._output_dir)
            return None
        # from another run's checkpoint, or one of a branch that this run has left, records begin anew
        is_own = self.checkpoints.holds(found.path)
        changed = self._changed(config, specs) if track else {}
        before, now = found.state.get("guard_class"), class_id(type(guard))
        is_other = guard is not None and found.state["guard"] is not None and before != now
        self.has_other_guard = is_other
        state.former_names = former = self._former_names(specs)
        if is_own:
            self._check_new_names(specs)
        with telling_of_removal(found.path):
            state.restore(found, without=["guard"] if is_other else [])
            entry = self.checkpoints.read_entry(found.path)
        if progress.step < config.max_steps:
            changed |= self._changed_code(found.state.get("code", {}), specs)
        if changed:
            pairs = {key: [cut_off(repr(own), 300) for own in pair] for key, pair in changed.items()}
            told = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in pairs.items())
            reason = f"{'resumed' if is_own else 'forked'} with other settings: {told}"
            self.events.append(Event(step=progress.step, source="run", kind="changed", reason=reason))
        if is_other:
            reason = f"the checkpoint's guard was {before}, this run's is {now}: it starts without history"
            self.events.append(Event(step=progress.step, source="guard", kind="warn", reason=reason))
        if track:
            self.checkpoints.set_aside_after(progress.step if is_own else -1)
            self.checkpoints.rename_tasks({old: name for name, own in former.items() for old in own})
            for known in self.checkpoints.entries.values():
                if guard is not None and (known.judged_by or before) != now:
                    known.judged_good = None  # by another guard
        logger.info("resumed from %s at step %d", found.path, progress.step)
        self.restored = found.path
        run_id = found.state["run_id"] if is_own else None
        if track and is_own:
            here = self._output_dir.resolve()
            original = Path(found.state.get("directory", here))
            if original != here and (original / "checkpoints").is_dir():
                logger.warning("a copy of %s, which still exists: trackers get a new run for it", original)
                run_id = None
            # events of resumes with other settings stay: so do the settings, though later steps are undone
            marks = b'"changed"', b'"resumed with other settings'
            lengths = found.state["records"]
            cut_records(self._output_dir, lengths, keep=lambda line: all(mark in line for mark in marks))
            self.resumed_at = progress.step
        elif track:
            set_records_aside(self._output_dir)
            # a fork begins as any run does: it is evaluated and saved before its first step
            progress.evaluated_at = progress.saved_at = -1
            self.forked = entry
            if guard is None or is_other or found.state["guard"] is None or state.has_new_tasks:
                self.forked.judged_good = None  # by another guard, or other rewards
        self._found = None
        return None if run_id is None else str(run_id)

    def _changed(self, config: RunConfig, specs: Mapping[str, TaskSpec]) -> dict[str, tuple[Any, Any]]:
        """Return the changed settings, without secrets: key -> (before, now)."""
        config_before = self.read_config(self._owner)
        old = dict(dotted(config_before))
        former_names = {name: spec.renamed_from for name, spec in specs.items() if spec.renamed_from}
        for name, former_name in former_names.items():
            start = f"tasks.{former_name}."
            own = {key.removeprefix(start): value for key, value in old.items() if key.startswith(start)}
            old |= {f"tasks.{name}.{key}": value for key, value in own.items() if key != "renamed_from"}
        new = dict(dotted(_resolved(config, specs)))
        if not (old.get("tasks_file") and new.get("tasks_file")):
            new.pop("tasks_file", None)  # a run without a tasks file has its tasks in ``config.yaml``
        has_critic = self._found is not None and any(n.startswith("critic/") for n in self._found.tensors)
        # an actor given in Python may have no name
        models = ["model.name_or_path"] if old.get("model.name_or_path") else []
        models += ["critic.trunk", "critic.name_or_path"] if has_critic else []
        for key in models:
            if key in old and _model_name(old[key]) != _model_name(new[key]):
                raise ConfigError(
                    f"the run in {str(self._owner)!r} was made with {key}={old[key]!r}, and now it is "
                    f"{new[key]!r}: its checkpoints would go on with the former weights. Choose another "
                    "output_dir, or set checkpoint.resume=never to begin anew; if it is the same model under "
                    "another name, correct config.yaml there"
                )
        places = {f"tasks.{name}.{key}" for name in specs for key in ("source", "renamed_from")}
        former = old_tasks if isinstance(old_tasks := config_before.get("tasks"), dict) else {}
        tasks = {"tasks": (list(former), list(specs))} if former and former.keys() != specs.keys() else {}
        lasting = {key.split(".")[1] for key in old if key.startswith("tasks.")} & {"", *specs}

        def is_told(key: str) -> bool:
            free = _FREE.match(key)
            return (key in old and key in new) or (free is not None and free[1] in {None, *lasting})

        told = (key for key in {**old, **new} if is_told(key))
        differing = (key for key in told if not _is_same(key, old.get(key), new.get(key)))
        changed = (key for key in differing if key not in {*_MAY_DIFFER, *places})
        return tasks | {key: (old.get(key), new.get(key)) for key in changed}

    def _changed_code(
        self, before: Mapping[str, Mapping[str, str]], specs: Mapping[str, TaskSpec]
    ) -> dict[str, tuple[str, str]]:
        """Return the plugins whose files differ from those of the checkpoint: key -> (before, now)."""
        return {
            f"code of {place_of(name, what)}": (old, new)
            for name, versions in self.code.versions.items()
            for former in [specs[name].renamed_from if name != RUN else name]
            for own in [before.get(name) or before.get(former) or {}]
            for what, new in versions.items()
            if (old := own.get(what, new)) != new
        }

    def save(self, entry: CheckpointEntry, state: RunState, run_id: str | None) -> Path:
        """Write a checkpoint, with the lengths of the run's records; return its directory.

        Raises:
            CheckpointError: it cannot be written, or a later run of this process has the directory.
        """
        self._check_owned()
        guard_class = class_id(type(state.guard))
        beside = {
            "guard_class": guard_class,
            "run_id": run_id,
            "directory": str(self._output_dir.resolve()),
            "records": record_lengths(self._output_dir),
            "code": self.code.versions,
        }
        return self.checkpoints.save(
            dataclasses.replace(entry, judged_by=guard_class if state.guard is not None else ""),
            save_actor=state.actor.save,
            tensors=state.tensors(),
            state={**state.state_dict(), **beside},
        )

    def read_config(self, run: Path | None = None) -> dict[str, Any]:
        """Return ``config.yaml`` of ``run`` (default: this run); nothing if it cannot be read."""
        file = (run or self._output_dir) / "config.yaml"
        try:
            value = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return value if isinstance(value, dict) else {}

    def recorded_tasks(self) -> Mapping[str, Any]:
        """Return the tasks of the run whose checkpoint this run is about to go on from; else none."""
        return self._former_tasks() if self._found is not None else {}

    def _former_tasks(self) -> Mapping[str, Any]:
        tasks = self.read_config(self._owner).get("tasks")
        return tasks if isinstance(tasks, Mapping) else {}

    def settings(self, config: RunConfig, specs: Mapping[str, TaskSpec]) -> dict[str, Any]:
        """Return the resolved configuration, with tasks, without secrets.

        Of a finished run it is the stored one; its ``max_steps`` is the number of steps that were made.

        Raises:
            TrainingError: the run is finished, and was made with other settings.
        """
        if self.resumed_at is not None and self.resumed_at >= config.max_steps:
            said = (
                f"the run in {self._output_dir} already made its {counted(self.resumed_at, 'step')}; raise "
                "max_steps to go on, or choose another output_dir for a new run"
            )
            if self.events:
                raise TrainingError(f"{said}. {self.events[0].reason}: no step would use them")
            logger.info("%s", said)
            written = self.read_config()  # a stopped run may end here by a smaller max_steps
            return {**written, "max_steps": self.resumed_at} if written else {}
        plain = _resolved(config, specs)
        if self.resumed_at is not None:
            for name, former in self._former_names(specs).items():
                plain["tasks"][name]["former_names"] = former
        return plain

    def _former_names(self, specs: Mapping[str, TaskSpec]) -> dict[str, list[str]]:
        """Return present name -> former names of renamed tasks; earlier records of the run have these."""
        before, found = self._former_tasks(), {}
        for name, spec in specs.items():
            own = before.get(name) or before.get(spec.renamed_from) or {}
            names = {*own.get("former_names", ()), spec.renamed_from} - {"", *specs}
            if names:
                found[name] = sorted(names)
        return found

    def _check_new_names(self, specs: Mapping[str, TaskSpec]) -> None:
        """Refuse a new task under a former name of another one, which records and checkpoints mean by it."""
        before = self.recorded_tasks()
        for old, own in before.items():
            heir = next((name for name, spec in specs.items() if old in (name, spec.renamed_from)), None)
            for name in own.get("former_names", ()):
                if name in specs and name not in before and heir not in (None, name):
                    raise ConfigError(
                        f"{specs[name].where}: in the records and checkpoints of this run {name!r} is the "
                        f"former name of task {heir!r}; give the new task another name"
                    )

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Write ``settings`` into ``config.yaml``. Call it after the event ``changed`` has been recorded.

        A resume finds changes by comparing with this file. For a finished run nothing is written.
        """
        if settings == self.read_config():
            return
        text = yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        with disk_errors(f"config.yaml in {self._output_dir}"):
            aside = self._output_dir / ".writing_config.yaml"
            aside.write_text(text, encoding="utf-8")
            aside.replace(self._output_dir / "config.yaml")


def _resolved(config: RunConfig, specs: Mapping[str, TaskSpec]) -> dict[str, Any]:
    """Return the whole configuration with its tasks as JSON data, without secrets."""
    resolved = dataclasses.asdict(config)
    resolved["tasks"] = {name: dataclasses.asdict(spec) for name, spec in specs.items()}
    plain: dict[str, Any] = redact(json.loads(json.dumps(resolved)))
    return plain


def _model_name(name: Any) -> tuple[str, ...]:
    """Return the end of a path that identifies a model: its name, or run and step of a run's checkpoint."""
    parts = Path(str(name)).parts
    return parts[-4:] if parts[-3:-2] == ("checkpoints",) else parts[-1:]


def _is_same(key: str, old: Any, new: Any) -> bool:
    """Whether a setting is the same; keys that only one side's reward or constraint has do not count."""
    if _ENTRIES.match(key) and isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(
            all(a[name] == b[name] for name in a.keys() & b.keys())
            for a, b in zip(old, new, strict=True)
            if isinstance(a, dict)
        )
    return bool(old == new)
