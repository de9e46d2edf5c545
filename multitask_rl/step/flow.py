"""Stages as nodes of a data flow: records pass once from the first stage to the last.

A training step is such a flow (``rollout -> constraints -> rewards -> advantages -> update``). A user inserts
a stage without touching the others, or builds another flow:

>>> double = Stage("double", lambda n: n * 2, consumes=int, produces=int)
>>> show = Stage("show", str, consumes=int, produces=str)
>>> flow = DataFlow([double]).connect(double, show)
>>> flow([1, 2])
['2', '4']
>>> print(flow)
double[int -> int] -> show[int -> str]
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from multitask_rl.errors import ConfigError, MultitaskRLError
from multitask_rl.records import Scored

logger = logging.getLogger(__name__)

Note = Callable[[str, tuple[float, float]], None]
"""Takes the name of a stage and the span of its work (``time.monotonic()``)."""


class Stage:
    """A node of a flow: a list of records in, a list of records out.

    Give a ``module`` that is called with each record (a result of None drops the record), or override
    ``process``. A subclass may set the other arguments as class attributes instead.

    Args:
        name: unique in its flow.
        module: function or other callable of one record.
        consumes: type of the records that come in; the flow checks it against the stage before.
        produces: type of the records that go out.
        num_workers: threads that each process a part of the list; the records must not depend on each other.
    """

    name: str = ""
    consumes: type = object
    produces: type = object
    num_workers: int = 1
    module: Callable[[Any], Any] | None = None

    def __init__(
        self,
        name: str = "",
        module: Callable[[Any], Any] | None = None,
        *,
        consumes: type | None = None,
        produces: type | None = None,
        num_workers: int | None = None,
    ) -> None:
        self.name = name or self.name
        self.module = self.module if module is None else module
        self.consumes = consumes or self.consumes
        self.produces = produces or self.produces
        self.num_workers = self.num_workers if num_workers is None else num_workers

    def process(self, items: list[Any]) -> list[Any]:
        """Turn the records of one step into those of the next stage."""
        if self.module is None:
            raise NotImplementedError(f"stage {self.name!r} needs a module, or a method process of its own")
        return [result for item in items if (result := self.module(item)) is not None]

    def close(self) -> None:
        """Free what the stage holds. Idempotent."""

    def __str__(self) -> str:
        workers = f" x{self.num_workers}" if self.num_workers > 1 else ""
        return f"{self.name}[{self.consumes.__name__} -> {self.produces.__name__}]{workers}"


class StreamingStage(Stage):
    """A stage that takes records as they come and passes each on when it is done, in any order.

    A subclass overrides ``stream``, and ``order`` if its records do not come in the order of their batch.
    """

    yields_batches: bool = False
    """True: the following stages process each list of ``stream`` as a batch of its own. False: all lists are
    one batch, and a following stage that does not stream waits for all of them."""

    def stream(self, parts: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Turn records into those of the next stage as they come."""
        raise NotImplementedError

    def order(self, record: Any) -> Any:
        """Return the key that sorts the records of a batch. Default: they keep their order."""
        return 0

    def process(self, items: list[Any]) -> list[Any]:
        """Return the results of ``stream`` in the order of the batch."""
        return _join(self, self.stream([items]))


class DataFlow:
    """Stages and the edges between them; runs in topological order.

    Args:
        stages: added in their order, each connected to the one before it. Further stages and edges come by
            ``add``, ``connect`` and ``insert``.

    Raises:
        ConfigError: as ``add`` and ``connect``.
    """

    def __init__(self, stages: Iterable[Stage] = ()) -> None:
        self._stages: list[Stage] = []
        self._edges: list[tuple[str, str]] = []
        """Source and target, in the order of connecting."""
        for stage in stages:
            self.add(stage)
            if len(self._stages) > 1:
                self.connect(self._stages[-2], stage)

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order they run: topological, stable in the order of adding."""
        waiting = {s.name: sum(target == s.name for _, target in self._edges) for s in self._stages}
        order: list[Stage] = []
        while waiting:
            ready = next((n for n, count in waiting.items() if count == 0), None)
            if ready is None:
                raise ConfigError(f"the flow has a circle through: {', '.join(waiting)}")
            order.append(self._find(ready))
            del waiting[ready]
            for follower in self._followers(ready):
                waiting[follower] -= 1
        return order

    def add(self, stage: Stage) -> DataFlow:
        """Add a stage without edges.

        Raises:
            ConfigError: no name, the name is taken, or ``num_workers`` is below 1.
        """
        if not stage.name or any(s.name == stage.name for s in self._stages):
            raise ConfigError(f"a stage needs a name of its own in the flow, got {stage.name!r}")
        if stage.num_workers < 1:
            raise ConfigError(f"stage {stage.name!r}: num_workers must be >= 1, got {stage.num_workers}")
        self._stages.append(stage)
        return self

    def connect(self, source: Stage | str, target: Stage | str) -> DataFlow:
        """Let the records of ``source`` flow to ``target``; stages not yet in the flow are added.

        A stage with several sources gets the records of one after the other, in the order of connecting.

        Raises:
            ConfigError: ``target`` does not consume what ``source`` produces, the edge closes a circle, or it
                exists.
        """
        for stage in (source, target):
            if isinstance(stage, Stage) and stage not in self._stages:
                self.add(stage)
        first, second = self._find(source), self._find(target)
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
            _ = self.stages
        except ConfigError:
            self._edges.remove(edge)
            raise
        return self

    def insert(self, stage: Stage, *, after: Stage | str) -> DataFlow:
        """Put ``stage`` on every edge that leaves ``after``, or at the end if none does.

        Raises:
            ConfigError: no such stage as ``after``, or as ``add`` and ``connect``.
        """
        self.add(stage)
        origin = self._find(after).name
        places = [i for i, (source, _) in enumerate(self._edges) if source == origin]
        moved = [self._edges[i] for i in places]
        self._edges = [edge for edge in self._edges if edge not in moved]
        self.connect(origin, stage)
        for place, (_, follower) in zip(places, moved, strict=True):
            self.connect(stage, follower)
            self._edges.insert(place, self._edges.pop())  # the follower's sources keep their order
        return self

    def split(self, at: Stage | str) -> tuple[DataFlow, DataFlow]:
        """Return two flows: the stages before ``at``, and those from it on.

        Raises:
            ConfigError: no such stage, or the flow has branches.
        """
        stages = self._chain("split")
        place = stages.index(self._find(at))
        return DataFlow(stages[:place]), DataFlow(stages[place:])

    def __call__(self, items: Iterable[Any], *, note: Note | None = None) -> list[Any]:
        """Pass ``items`` through once and return what the last of ``stages`` produces.

        Each stage without a source gets ``items``. ``note`` gets the span of each stage that does not stream.
        """
        stages, given = self.stages, list(items)
        if self._is_chain(stages):
            return _join(stages[-1], self.stream(given, note=note)) if stages else given
        outputs: dict[str, list[Any]] = {}
        for stage in stages:
            sources = [source for source, target in self._edges if target == stage.name]
            reached = [record for source in sources for record in outputs[source]]
            outputs[stage.name] = _timed(stage, reached if sources else given, note)
        return list(outputs.values())[-1]

    def stream(self, items: Iterable[Any], *, note: Note | None = None) -> Iterator[list[Any]]:
        """Pass ``items`` through a flow without branches; yield records as the last stage ends them.

        A stage that does not stream waits for all records. After a stage with ``yields_batches``, the other
        stages process each of its lists alone.

        Raises:
            ConfigError: the flow has branches.
        """
        stages = self._chain("streamed")
        parts: Iterator[list[Any]] = iter([list(items)])
        source: Stage | None = None
        for place, stage in enumerate(stages):
            if not isinstance(stage, StreamingStage):
                parts = _at_once(stage, source, parts, note)
            else:
                # records that end at once may come in the order in which the stage computed them
                parts = map(partial(sorted, key=stage.order), _streamed(stage, stage.stream(parts)))
                if stage.yields_batches:
                    rest = DataFlow(stages[place + 1 :])
                    return (rest(part, note=note) if part else [] for part in parts)
            source = stage
        return parts

    def run(
        self,
        source: Callable[[int], Iterable[Any]] | Iterable[Iterable[Any]] | None = None,
        *,
        max_steps: int,
    ) -> list[Any]:
        """Feed ``max_steps`` batches of ``source`` through the flow; return the output of the last.

        Args:
            source: a function of the step's number, or an iterable of batches. None: the first stage gets an
                empty list each step and makes the records itself.
            max_steps: batches at most.
        """
        batches: Iterable[Iterable[Any]]
        if source is None:
            batches = itertools.repeat(())
        else:
            batches = map(source, itertools.count()) if callable(source) else source
        output: list[Any] = []
        for batch in itertools.islice(batches, max_steps):
            output = self(batch)
        if source is None and not output:
            logger.warning("the flow made no record in its last step; give run a source of records")
        return output

    def close(self) -> None:
        """Close every stage, also when the ``close`` of another one raises."""
        with contextlib.ExitStack() as closing:
            for stage in reversed(self._stages):
                closing.callback(stage.close)

    def to_mermaid(self) -> str:
        """Return the graph as Mermaid text (any Markdown viewer draws it)."""
        lines = ["graph TD"]
        for stage in self._stages:
            lines.append(f'    {stage.name}["{stage}"]')
        for source, target in self._edges:
            lines.append(f"    {source} -- {self._find(source).produces.__name__} --> {target}")
        return "\n".join(lines)

    def __str__(self) -> str:
        stages = self.stages
        if self._is_chain(stages):
            return " -> ".join(map(str, stages))
        return "\n".join(f"{s} -> {', '.join(self._followers(s.name)) or 'end'}" for s in self._stages)

    def _followers(self, name: str) -> list[str]:
        return [target for source, target in self._edges if source == name]

    def _is_chain(self, stages: Sequence[Stage]) -> bool:
        return sorted(self._edges) == sorted((a.name, b.name) for a, b in itertools.pairwise(stages))

    def _chain(self, use: str) -> list[Stage]:
        stages = self.stages
        if not self._is_chain(stages):
            raise ConfigError(f"only a flow without branches can be {use}")
        return stages

    def _find(self, wanted: Stage | str) -> Stage:
        name = wanted if isinstance(wanted, str) else wanted.name
        for stage in self._stages:
            if stage.name == name:
                return stage
        raise ConfigError(
            f"no stage {name!r} in the flow; there are: {', '.join(s.name for s in self._stages)}"
        )


def _join(stage: Stage | None, parts: Iterable[list[Any]]) -> list[Any]:
    """Return the lists that ``stage`` yielded as one, in the order of their batch."""
    records = [record for part in parts for record in part]
    return sorted(records, key=stage.order) if isinstance(stage, StreamingStage) else records


def _at_once(
    stage: Stage, source: Stage | None, parts: Iterable[list[Any]], note: Note | None
) -> Iterator[list[Any]]:
    yield _timed(stage, _join(source, parts), note)


def _streamed(stage: Stage, parts: Iterator[list[Any]]) -> Iterator[list[Any]]:
    with _naming(stage):
        yield from parts


@contextlib.contextmanager
def _naming(stage: Stage) -> Iterator[None]:
    """Add the stage's name to an unexpected error, unless another stage has added its own."""
    try:
        yield
    except MultitaskRLError:
        raise
    except Exception as error:
        if not vars(error).get("__notes__"):
            error.add_note(f"in the stage {stage.name!r}")
        raise


def _timed(stage: Stage, items: list[Any], note: Note | None) -> list[Any]:
    began = time.monotonic()
    with _naming(stage):
        if stage.num_workers == 1 or len(items) < 2:
            output = stage.process(items)
        else:
            size = -(-len(items) // stage.num_workers)
            with ThreadPoolExecutor(stage.num_workers, thread_name_prefix=stage.name) as pool:
                parts = pool.map(stage.process, (items[i : i + size] for i in range(0, len(items), size)))
                output = [record for part in parts for record in part]
        for record in output:
            if isinstance(record, Scored):
                record.check_reward()
    if note is not None:
        note(stage.name, (began, time.monotonic()))
    return output
