"""Weights by name that are brought bucket by bucket, so that one bucket at a time takes memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

BUCKET_BYTES = 2**26
"""A bucket has so many bytes, or a single weight with more."""


class WeightStream(Mapping[str, Tensor]):
    """Weights by name; reading in order brings each bucket once, and drops the bucket before it.

    Args:
        like: tensors with names, shapes and types of the weights, in order; their values are not read.
        bring: returns the weights of the names of one bucket.
        most: bytes of a bucket.
        buckets: names that are brought together, in order; None = cut by ``most``.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        bring: Callable[[Sequence[str]], Mapping[str, Tensor]],
        most: int = BUCKET_BYTES,
        *,
        buckets: list[list[str]] | None = None,
    ) -> None:
        self.like = like
        self.buckets = cut_buckets(like, most) if buckets is None else buckets
        self._bring = bring
        self._bucket_of = {name: names for names in self.buckets for name in names}
        self._held: Mapping[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the bucket that was read last."""
        return {**self.__dict__, "_held": {}}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            names = self._bucket_of[name]
            self._held = {}  # before the next takes memory
            self._held = self._bring(names)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.like
        self._held = {}

    def __len__(self) -> int:
        return len(self.like)


def cut_buckets(
    like: Mapping[str, Tensor], most: int = BUCKET_BYTES, *, keep_blocks: bool = False
) -> list[list[str]]:
    """Return the names of ``like`` in order, in lists of at most ``most`` bytes, or of one weight.

    With ``keep_blocks`` a list is not cut inside a block of modules (an attention), and may have more bytes.
    """
    buckets: list[list[str]] = []
    size, block = 0, None
    for name, tensor in like.items():
        before, block = block, name.rsplit(".", 2)[0]
        if not buckets or (size + tensor.nbytes > most and not (keep_blocks and block == before)):
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += tensor.nbytes
    return buckets


class SavedWeights(WeightStream):
    """``weights`` with the names and shapes that ``save_pretrained`` of ``model`` writes.

    Files hold some tensors of ``transformers`` in parts (experts) and others joined (attention of HRM).
    """

    def __init__(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        given = like_of(weights)
        like: dict[str, Tensor] = {}
        sources: dict[str, list[str]] = {}
        buckets = []
        # no bucket ends between neighbours that are joined
        for names in cut_buckets(given, keep_blocks=True):
            written = revert_weight_conversion(model, {name: given[name].to("meta") for name in names})
            buckets.append(list(written))
            like |= written
            sources |= dict.fromkeys(written, names)

        def bring(names: Sequence[str]) -> Mapping[str, Tensor]:
            own = {name: weights[name].detach() for name in sources[names[0]]}
            found: Mapping[str, Tensor] = revert_weight_conversion(model, own)
            return found

        super().__init__(like, bring, buckets=buckets)


def as_saved(model: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return ``weights`` if ``save_pretrained`` keeps their names and shapes, else ``SavedWeights``."""
    saved = SavedWeights(model, weights)
    given = {name: tensor.shape for name, tensor in like_of(weights).items()}
    return weights if given == {name: tensor.shape for name, tensor in saved.like.items()} else saved


def like_of(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with the names, shapes and types of ``weights``; nothing of a stream is read."""
    return weights.like if isinstance(weights, WeightStream) else weights


def buckets_of(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names that are read together: a stream's buckets, or all."""
    return weights.buckets if isinstance(weights, WeightStream) else [list(weights)]


class WeightParts(Protocol):
    """The weights of an actor of which several processes hold parts."""

    def stream(self, without: Collection[str] = ()) -> WeightStream:
        """Return the whole weights by name, as they are when they are read, less those of some names."""
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Set the parts of all processes from whole ``weights``."""
        ...

    def keep(self) -> Callable[[], Any]:
        """Return a function that sets the parts of all processes to what they are now."""
        ...
