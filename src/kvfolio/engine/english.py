"""Text that is on every machine: the language reference that ships with Python, as token ids.

Knows nothing of models beyond their tokenizer.
"""

from pydoc_data import topics

from kvfolio.engine.text import Tokenizer
from kvfolio.errors import OptionError


def english_ids(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Exactly ``num_tokens`` token ids of English. Raises OptionError if there are not as many."""
    ids: list[int] = []
    for name in sorted(topics.topics):
        ids.extend(tokenizer.encode_more(topics.topics[name]) if ids else tokenizer.encode(topics.topics[name]))
        if len(ids) >= num_tokens:
            return ids[:num_tokens]
    raise OptionError(f"the built-in text has {len(ids):,} tokens, {num_tokens:,} were asked for")
