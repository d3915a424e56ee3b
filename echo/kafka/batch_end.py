"""Where a batch ends that the client can't unpack: found by asking for offsets and looking what comes. Pure.

The client reports such a batch by its first offset alone, again and again, and never passes it over. Asked for an offset inside
the batch, it reports the same; asked for one after it, it gives what stands there.

    search = BatchEnd(first, outside=high_watermark)
    while (offset := search.ask) is not None:
        search.inside() if <the same batch is reported> else search.beyond(<offset of what came>)
    search.end

Refuses to pass over a readable record: an offset counts as inside only if the batch was reported there.
"""


class BatchEnd:
    """first: the first offset of the batch that is not passed over yet. outside: an offset known to be after the batch."""

    def __init__(self, first: int, outside: int) -> None:
        self.first = first
        self._inside = first
        self._outside = max(outside, first + 1)
        # Most batches are small and some are huge: steps double until one leads outside, then the rest is halved.
        self._step = 1

    @property
    def ask(self) -> int | None:
        """The offset to ask for next; None once the end is known."""
        if self._outside - self._inside == 1:
            return None
        ahead = self._inside + self._step
        return ahead if ahead < self._outside else (self._inside + self._outside) // 2

    @property
    def end(self) -> int:
        """The first offset after the batch."""
        assert self.ask is None
        return self._outside

    def inside(self) -> None:
        """The batch was reported at the offset asked for."""
        asked = self.ask
        assert asked is not None
        self._inside = asked
        self._step *= 2

    def beyond(self, offset: int) -> None:
        """Something else came: a record or another batch that begins at `offset`, or the end of the log there."""
        asked = self.ask
        assert asked is not None
        self._outside = min(asked, max(offset, self._inside + 1))
