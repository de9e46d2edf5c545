"""Stages as nodes of a data flow: typed inputs, typed outputs, data passes once from top to bottom.

The built-in run is such a flow (``rollout -> constraints -> rewards -> advantages``); a user inserts a node
without touching the others, or composes a flow of their own:

>>> double = FunctionStage("double", lambda n: n * 2, consumes=int, produces=int)
>>> show = FunctionStage("show", str, consumes=int, produces=str)
>>> flow = DataFlow([double]).connect(double, show)
>>> flow([1, 2])
['2', '4']
>>> print(flow)
double[int -> int] -> show[int -> str]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from multitask_rl.errors import ConfigError

__all__ = ["DataFlow", "FunctionStage", "Stage", "in_order"]

Note = Callable[[str, tuple[float, float]], None]
"""Takes the name of a stage and when it was at work (``time.monotonic()``)."""


class Stage:
    """A node: a list of records in, a list of records out.

    Subclasses name the record types they consume and produce and implement ``process``. With ``num_workers``
    above 1 the list is cut into as many parts that are processed at once; only stages whose records do not
    depend on each other may say so.
    """

    name: str = ""
    consumes: type = object
    produces: type = object
    num_workers: int = 1

    def process(self, items: list[Any]) -> list[Any]:
        """Turn the records of one step into those of the next stage."""
        raise NotImplementedError

    def stream(self, parts: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Turn records into those of the next stage as they come, in any order.

        By default a stage waits until it has all of them, in the order of the batch, for it may look at them
        together (a filter over the whole step): what comes after it starts only then.
        """
        yield _process(self, in_order(parts))

    def close(self) -> None:
        """Free what the stage holds. Idempotent."""

    def __str__(self) -> str:
        workers = f" x{self.num_workers}" if self.num_workers > 1 else ""
        return f"{self.name}[{self.consumes.__name__} -> {self.produces.__name__}]{workers}"


class FunctionStage(Stage):
    """A stage of a function of one record; a result of None drops the record (a filter)."""

    def __init__(
        self,
        name: str,
        function: Callable[[Any], Any],
        *,
        consumes: type = object,
        produces: type = object,
        num_workers: int = 1,
    ) -> None:
        self.name = name
        self.consumes = consumes
        self.produces = produces
        self.num_workers = num_workers
        self._function = function

    def process(self, items: list[Any]) -> list[Any]:
        """Apply the function to every record."""
        results = (self._function(item) for item in items)
        return [r for r in results if r is not None]


class DataFlow:
    """Stages and the edges between them; runs in topological order."""

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages: list[Stage] = []
        self._edges: list[tuple[str, str]] = []
        """Source and target, in the order of connecting."""
        previous: Stage | None = None
        for stage in stages:
            self.add(stage)
            if previous is not None:
                self.connect(previous, stage)
            previous = stage

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order they run."""
        return [self._by_name(n) for n in self._order()]

    def add(self, stage: Stage) -> DataFlow:
        """Add a stage without edges.

        Raises:
            ConfigError: no name, or the name is taken.
        """
        if not stage.name or any(s.name == stage.name for s in self._stages):
            raise ConfigError(f"a stage needs a name of its own in the flow, got {stage.name!r}")
        if stage.num_workers < 1:
            raise ConfigError(f"stage {stage.name!r}: num_workers must be >= 1, got {stage.num_workers}")
        self._stages.append(stage)
        return self

    def connect(self, source: Stage | str, target: Stage | str) -> DataFlow:
        """Let the records of ``source`` flow to ``target``; stages not yet in the flow are added.

        A stage that several flow to gets the records of each, one source after the other in the order of
        connecting.

        Raises:
            ConfigError: ``target`` does not consume what ``source`` produces, or the edge closes a circle or
                is there already.
        """
        for stage in (source, target):
            if isinstance(stage, Stage) and stage not in self._stages:
                self.add(stage)
        first, second = self._by_name(_name(source)), self._by_name(_name(target))
        if not issubclass(first.produces, second.consumes):
            raise ConfigError(
                f"stage {second.name!r} consumes {second.consumes.__name__}, but {first.name!r} produces "
                f"{first.produces.__name__}; put a stage between them that converts"
            )
        edge = (first.name, second.name)
        if edge in self._edges:
            raise ConfigError(f"stage {first.name!r} is connected to {second.name!r} already")
        self._edges.append(edge)
        try:
            self._order()
        except ConfigError:
            self._edges.remove(edge)
            raise
        return self

    def insert(self, stage: Stage, *, after: Stage | str) -> DataFlow:
        """Put ``stage`` on every edge that leaves ``after`` (and at its end, if none does)."""
        self.add(stage)
        origin = _name(after)
        places = [i for i, (source, _) in enumerate(self._edges) if source == self._by_name(origin).name]
        moved = [self._edges[i] for i in places]
        self._edges = [edge for edge in self._edges if edge not in moved]
        self.connect(origin, stage)
        for place, (_, follower) in zip(places, moved, strict=True):
            self.connect(stage, follower)
            self._edges.insert(place, self._edges.pop())  # the follower's sources keep their order
        return self

    def __call__(
        self,
        items: Iterable[Any],
        *,
        start: str | None = None,
        before: str | None = None,
        note: Note | None = None,
    ) -> list[Any]:
        """Pass ``items`` through once and return what the last stage produced, or what reaches ``before``.

        Args:
            items: records for every stage that none flows to (or for ``start``).
            start: first stage that runs; with branches, only what it flows to runs after it.
            before: stage to stop at, not run.
            note: is told when each stage that does not stream was at work.

        Raises:
            ConfigError: no stage ``start`` or ``before``.
        """
        order = self._order()
        first = self._place(order, start) if start else 0
        last = self._place(order, before) if before else len(order)
        if first >= last:
            return list(items)
        if self._is_chain(order):
            return in_order(self._stream(list(items), order[first:last], note))
        given = list(items)
        outputs: dict[str, list[Any]] = {}
        for name in order[first:last]:
            reached = self._reaching(name, outputs)
            if name == start or (start is None and not self._sources(name)):
                reached = given
            if reached is not None:
                outputs[name] = _timed(self._by_name(name), list(reached), note)
        if before:
            return self._reaching(before, outputs) or []
        return list(outputs.values())[-1]

    def stream(self, items: Iterable[Any], *, before: str, note: Note | None = None) -> Iterator[list[Any]]:
        """Pass ``items`` through a flow without branches; yield what reaches ``before`` as it comes.

        Raises:
            ConfigError: the flow has branches.
        """
        order = self._order()
        if not self._is_chain(order):
            raise ConfigError("only a flow without branches can be streamed")
        return self._stream(list(items), order[: self._place(order, before)], note)

    def after(self, name: str) -> str | None:
        """Return the name of the stage that runs after ``name``; None for the last."""
        order = self._order()
        place = self._place(order, name) + 1
        return order[place] if place < len(order) else None

    def _stream(self, items: list[Any], names: Sequence[str], note: Note | None) -> Iterator[list[Any]]:
        parts: Iterator[list[Any]] = iter([items])
        for name in names:
            stage = self._by_name(name)
            streams = type(stage).stream is not Stage.stream
            parts = stage.stream(parts) if streams else _at_once(stage, parts, note)
        return parts

    def run(
        self, source: Callable[[int], Iterable[Any]] | Iterable[Iterable[Any]], *, max_steps: int
    ) -> list[Any]:
        """Feed ``max_steps`` batches of ``source`` through the flow; return the output of the last.

        Args:
            source: a function of the step's number, or an iterable of batches.
            max_steps: batches at most.
        """
        batches: Iterator[Iterable[Any]] = (
            (source(step) for step in range(max_steps)) if callable(source) else iter(source)
        )
        output: list[Any] = []
        for _, batch in zip(range(max_steps), batches, strict=False):
            output = self(batch)
        return output

    def close(self) -> None:
        """Close every stage."""
        for stage in self._stages:
            stage.close()

    def to_mermaid(self) -> str:
        """Return the graph as Mermaid text (any Markdown viewer draws it)."""
        lines = ["graph TD"]
        for stage in self._stages:
            lines.append(f'    {stage.name}["{stage}"]')
        for source, target in self._edges:
            lines.append(f"    {source} -- {self._by_name(source).produces.__name__} --> {target}")
        return "\n".join(lines)

    def __str__(self) -> str:
        if self._is_chain(self._order()):
            return " -> ".join(map(str, self.stages))
        return "\n".join(f"{s} -> {', '.join(self._followers(s.name)) or 'end'}" for s in self._stages)

    def _sources(self, name: str) -> list[str]:
        return [source for source, target in self._edges if target == name]

    def _followers(self, name: str) -> list[str]:
        return [target for source, target in self._edges if source == name]

    def _reaching(self, name: str, outputs: Mapping[str, list[Any]]) -> list[Any] | None:
        """Return what the sources of ``name`` produced, one after the other; None if none of them ran."""
        ran = [outputs[source] for source in self._sources(name) if source in outputs]
        return [record for output in ran for record in output] if ran else None

    def _is_chain(self, order: Sequence[str]) -> bool:
        return sorted(self._edges) == sorted(pairwise(order))

    def _place(self, order: Sequence[str], name: str) -> int:
        return order.index(self._by_name(name).name)

    def _by_name(self, name: str) -> Stage:
        for stage in self._stages:
            if stage.name == name:
                return stage
        raise ConfigError(
            f"no stage {name!r} in the flow; there are: {', '.join(s.name for s in self._stages)}"
        )

    def _order(self) -> list[str]:
        """Topological order, stable in the order of adding."""
        waiting = {s.name: 0 for s in self._stages}
        for _, target in self._edges:
            waiting[target] += 1
        order: list[str] = []
        while waiting:
            ready = next((n for n, count in waiting.items() if count == 0), None)
            if ready is None:
                raise ConfigError(f"the flow has a circle through: {', '.join(waiting)}")
            order.append(ready)
            del waiting[ready]
            for follower in self._followers(ready):
                waiting[follower] -= 1
        return order


def in_order(parts: Iterable[list[Any]]) -> list[Any]:
    """Return all records; if they came in several parts and know their place (``order``), in that order."""
    found = list(parts)
    records = [record for part in found for record in part]
    if len(found) > 1 and all(hasattr(record, "order") for record in records):
        records.sort(key=lambda record: record.order)
    return records


def _name(stage: Stage | str) -> str:
    return stage if isinstance(stage, str) else stage.name


def _at_once(stage: Stage, parts: Iterable[list[Any]], note: Note | None) -> Iterator[list[Any]]:
    yield _timed(stage, in_order(parts), note)


def _timed(stage: Stage, items: list[Any], note: Note | None) -> list[Any]:
    began = time.monotonic()
    output = _process(stage, items)
    if note is not None:
        note(stage.name, (began, time.monotonic()))
    return output


def _process(stage: Stage, items: list[Any]) -> list[Any]:
    if stage.num_workers == 1 or len(items) < 2:
        return stage.process(items)
    size = -(-len(items) // stage.num_workers)
    parts = [items[i : i + size] for i in range(0, len(items), size)]
    with ThreadPoolExecutor(stage.num_workers, thread_name_prefix=stage.name) as pool:
        return [record for part in pool.map(stage.process, parts) for record in part]
