"""How fast a cache decodes at the end of a text, beside the limit that memory bandwidth sets.

Knows nothing of quality, and not what a format is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfolio.engine.llm import LLM
from kvfolio.engine.loaded import LoadedModel
from kvfolio.engine.params import SamplingParams
from kvfolio.kernels.profile import read_bandwidth


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """One sequence that decodes, and the same bytes at the bandwidth measured right behind it."""

    tokens_per_s: float
    limit_tokens_per_s: float
    bytes_read_per_token: int  # weights and cache


def decode_speed(loaded: LoadedModel, token_ids: Sequence[int], num_tokens: int, **options: Any) -> DecodeSpeed:
    """Decode ``num_tokens`` behind the text without its last ones, so that it ends where the text does.

    Counts the steps that decode alone: the first token comes out of the prompt's pass. A text of at least 3 tokens.
    """
    num_tokens = max(2, min(num_tokens, len(token_ids) - 1))
    llm = LLM(loaded, dtype=loaded.dtype, device=str(loaded.device), max_running=1, prefix_cache=False, **options)
    llm.generate([token_ids[:-num_tokens]], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    meter, bandwidth = llm.engine.decode_meter, read_bandwidth(loaded.device)
    return DecodeSpeed(
        meter.num_tokens / meter.time_s,
        meter.num_tokens * bandwidth / meter.bytes_read,
        meter.bytes_read // meter.num_tokens,
    )
