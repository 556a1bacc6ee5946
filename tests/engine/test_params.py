"""What a request may ask of the sampler. Knows nothing of how it is done."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

from kvfolio.engine.params import SamplingParams
from kvfolio.errors import OptionError

SRC = Path(__file__).resolve().parents[2] / "src"


def test_nothing_asked_is_greedy_and_unfiltered() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    assert (params.stop, params.stop_token_ids, params.logprobs, params.seed) == ((), (), None, None)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 1e-30),
        ("temperature", 2),
        ("top_k", 0),
        ("top_k", 10**9),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("ignore_eos", True),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
    ],
)
def test_the_ends_of_a_range_are_accepted(field: str, given: object) -> None:
    assert getattr(SamplingParams(**{field: given}), field) == given


REFUSED = {
    "max_tokens": [0, -1, 1.5, 2.0, True, None, "8", math.nan],
    "temperature": [-0.1, math.nan, math.inf, -math.inf, True, None, "1", 1j, 10**400],
    "top_k": [-1, 0.5, 40.0, True, None, "40"],
    "top_p": [0, 0.0, -0.5, 1.001, math.nan, math.inf, True, None, "0.9"],
    "min_p": [-0.1, 1.1, math.nan, math.inf, True, None],
    "seed": [-1, 2**63, 1.0, True, "7", math.nan],
    "stop": ["", [""], ["a", ""], [1], None, 5, {"a"}, [None], b"a", [b"a"]],
    "stop_token_ids": [[-1], [1.0], [True], ["1"], None, 5, "12", {1}],
    "ignore_eos": [0, 1, None, "yes"],
    "logprobs": [-1, 21, 5.0, True, False, "5", math.nan],
    "prompt_logprobs": [-1, 21, 5.0, True, False, "5", math.nan],
}


@pytest.mark.parametrize(("field", "given"), [(field, given) for field in REFUSED for given in REFUSED[field]])
def test_a_value_outside_its_range_is_refused_with_the_value_and_what_is_accepted(field: str, given: object) -> None:
    with pytest.raises(OptionError, match=rf"^{field} is .*; accepted: .*; ") as caught:
        SamplingParams(**{field: given})
    assert len(str(caught.value)) < 200


def test_every_field_has_values_that_are_refused() -> None:
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("given", "kept"), [("END", ("END",)), (["a", "b"], ("a", "b")), ((), ()), ([], ())])
def test_stop_strings_are_kept_as_a_tuple(given: object, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


def test_a_list_changed_later_does_not_change_the_parameters() -> None:
    stops, ids = ["a"], [7]
    params = SamplingParams(stop=stops, stop_token_ids=ids)
    stops.append("b")
    ids.append(8)
    assert (params.stop, params.stop_token_ids) == (("a",), (7,))
    assert hash(params) == hash(SamplingParams(stop="a", stop_token_ids=(7,)))


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def test_keeping_only_the_best_token_is_greedy() -> None:
    assert SamplingParams(temperature=1.0, top_k=1).is_greedy
    assert not SamplingParams(temperature=1.0, top_k=2).is_greedy


def test_parameters_can_be_made_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvfolio.engine.params"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SRC)})
