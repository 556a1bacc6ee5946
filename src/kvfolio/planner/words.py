"""What people call each kind of layer memory: one table, that every face reads.

Knows nothing of bytes, nor of how a face lays its words out.
"""

from dataclasses import dataclass

from kvfolio.spec.layers import RecurrentState, SingleKind


@dataclass(frozen=True, slots=True)
class KindWords:
    """``short``: behind a number of layers ("10 full"); ``long``: alone, as the name of a part of the cache."""

    short: str
    long: str


KIND_WORDS = {  # by the ``kind`` of a layer; a combined one is named by its parts
    "full": KindWords("full", "full attention"),
    "sliding_window": KindWords("window", "sliding windows"),
    "chunked": KindWords("chunk", "chunks"),
    "block_sparse": KindWords("block-sparse", "block-sparse attention"),
    "latent": KindWords("MLA", "latents (MLA)"),
    "latent_indexed": KindWords("indexed MLA", "latents with an index"),
    "compressed_sparse": KindWords("compressed", "compressed vectors"),
    "recurrent": KindWords("state", "states"),
    "cross_attention": KindWords("cross", "cross-attention"),
    "shared": KindWords("shared", "caches of earlier layers"),
    "none": KindWords("without cache", "no cache"),
}


def long_words(part: SingleKind) -> str:
    """The name of one memory; a state is named with its mechanism: ``states (mamba2)``."""
    words = KIND_WORDS[part.kind].long
    return f"{words} ({part.mechanism})" if isinstance(part, RecurrentState) else words
