"""Texts read by a decoder from their beginning, together and in pieces."""

from collections.abc import Iterator, Sequence

from compressor.decode.cache import SequenceCache
from compressor.decode.decoder import CHUNK, Decoder, Feed, Pass


def pieces(
    decoder: Decoder, texts: Sequence[Sequence[int]], caches: Sequence[SequenceCache], features: Sequence[int] = ()
) -> Iterator[tuple[int, Pass]]:
    """Read every text into its empty cache, at most `CHUNK` tokens of each in a pass; gives the index of a text and
    what the pass says of its next piece, whose last token alone has logits. `features` as of `Decoder.forward`."""
    for start in range(0, max(map(len, texts), default=0), CHUNK):
        reading = [i for i, text in enumerate(texts) if len(text) > start]
        feeds = [Feed(texts[i][start : start + CHUNK], caches[i]) for i in reading]
        for i, feed, out in zip(reading, feeds, decoder.forward(feeds, features), strict=True):
            caches[i].keep(len(feed.tokens))
            yield i, out


def batches_of(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in order, in batches of at most `tokens` tokens or one text."""
    batch: list[int] = []
    for index, length in enumerate(lengths):
        if batch and sum(lengths[i] for i in batch) + length > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
