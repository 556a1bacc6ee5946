"""Sink blocks are exact: what lies in them is read as it was computed, whatever the format of the others.

Knows nothing of how they are found, shared or swapped: tests/cache; nor that a hit gives what a miss gives: SETTINGS
of tests/parity/cold.py.
"""

from collections.abc import Callable

import pytest
import torch
from cold import Setting, Warm, spelled
from served import greedy
from tiny import some_tokens

OpenWarm = Callable[..., Warm]

OTHERS_EXACT = "0-1=exact,3-4=exact,6=exact"  # the windows of gemma3
CASES = [
    (Setting("llama", "f32", "int8", sink_blocks=3), Setting("llama"), Setting("llama", "f32", "int8")),
    (
        Setting("gemma3", "f32", "int8", OTHERS_EXACT, sink_blocks=3),
        Setting("gemma3"),
        Setting("gemma3", "f32", "int8", OTHERS_EXACT),
    ),
]


@pytest.mark.parametrize(("sinks", "exact", "lossy"), CASES, ids=lambda setting: spelled(setting))
def test_a_text_that_lies_in_its_sinks_is_read_exactly(
    sinks: Setting, exact: Setting, lossy: Setting, open_warm: OpenWarm
) -> None:
    prompt = some_tokens(11)  # three blocks of four with one token generated, and the own block
    warm = [open_warm(setting) for setting in (sinks, exact, lossy)]
    for num_tokens in (5, 11):
        one, other, coded = (each.ask([prompt[:num_tokens]], greedy(4)).logits[0] for each in warm)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
        assert (coded - other).abs().max() > 1e-3


@pytest.mark.parametrize(("sinks", "exact", "lossy"), CASES, ids=lambda setting: spelled(setting))
def test_behind_the_sinks_a_text_is_read_as_stored_and_its_sinks_still_exactly(
    sinks: Setting, exact: Setting, lossy: Setting, open_warm: OpenWarm
) -> None:
    prompt = some_tokens(60)
    one, other, coded = (open_warm(setting).ask([prompt], greedy(1)).logits[0] for setting in (sinks, exact, lossy))
    assert (one - other).abs().max() > 1e-4
    assert (one - coded).abs().max() > 1e-4
