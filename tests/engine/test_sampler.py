"""One token a row, whoever else is in the batch. Knows nothing of text."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfolio.engine.params import SamplingParams
from kvfolio.engine.sampler import Sampled, Sampler, _weights
from kvfolio.errors import InvariantError, KvfolioError

VOCAB = 1000
ALL = SamplingParams(temperature=1.0)


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """[num_rows, vocab] f32."""
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def choose(row: Tensor, params: SamplingParams) -> Sampled:
    (sampled,) = Sampler().sample(row.unsqueeze(0), [("r", params)])
    return sampled


def support(row: Tensor, num_draws: int = 400, **options: float) -> set[int]:
    """Every token that came out of many draws."""
    sampler, params = Sampler(), SamplingParams(temperature=options.pop("temperature", 1.0), seed=1, **options)
    return {sampler.sample(row.unsqueeze(0), [("r", params)])[0].token_id for _ in range(num_draws)}


def log_of(*shares: float) -> Tensor:
    return torch.tensor(shares).log()


# ---- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, VOCAB, dtype=dtype)
    logits[0, [700, 31, 999]] = 2.0
    logits[1, 999] = 0.5
    sampled = Sampler().sample(logits, [("a", SamplingParams()), ("b", SamplingParams()), ("c", SamplingParams())])
    assert sampled == [Sampled(31), Sampled(999), Sampled(0)]


def test_top_k_of_one_is_greedy_even_at_a_temperature() -> None:
    row = torch.zeros(VOCAB)
    row[[700, 31]] = 2.0
    assert choose(row, SamplingParams(temperature=5.0, top_k=1)) == Sampled(31)


def test_no_request_gives_no_token() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []) == []


def test_a_tiny_temperature_is_nearly_greedy_and_never_nan() -> None:
    row = random_logits(1)[0]
    for temperature in (1e-4, 1e-30, 1e-45, 5e-324):
        assert choose(row, SamplingParams(temperature=temperature)).token_id == int(row.argmax())


def test_a_huge_temperature_is_nearly_uniform_and_never_nan() -> None:
    assert len(support(torch.tensor([9.0, 0.0, -9.0]), temperature=1e300)) == 3


# ---- the others in the batch ----------------------------------------------------------------------------------------


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 9),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(deadline=None, max_examples=60)
@given(params=st.lists(PARAMS, min_size=2, max_size=6), data=st.data())
def test_a_row_gives_the_same_bits_alone_and_in_any_batch_in_any_order(
    params: list[SamplingParams], data: st.DataObject
) -> None:
    logits = random_logits(len(params)).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    order = data.draw(st.permutations(range(len(params))))
    alone = [choose(logits[number], params[number]) for number in range(len(params))]
    together = Sampler().sample(logits[list(order)], [(number, params[number]) for number in order])
    assert together == [alone[number] for number in order]


def test_a_row_gives_the_same_bits_from_a_strided_view() -> None:
    wide = random_logits(3, vocab=2 * VOCAB)
    params = SamplingParams(temperature=1.0, top_p=0.8, seed=3, logprobs=2)
    view = Sampler().sample(wide[:, ::2], [(n, params) for n in range(3)])
    assert view == [choose(wide[n, ::2].contiguous(), params) for n in range(3)]


def test_seeded_tokens_do_not_depend_on_companions_or_on_a_pause() -> None:
    logits = random_logits(20, seed=5)
    params = SamplingParams(temperature=1.0, seed=42)
    quiet, busy = Sampler(), Sampler()
    expected = [quiet.sample(logits[step : step + 1], [("r", params)])[0].token_id for step in range(20)]
    found = []
    for step in range(20):
        if step % 3 == 0:  # steps in which r is preempted and only others run
            busy.sample(logits[:4], [(f"other {n}", ALL) for n in range(4)])
        rows = torch.stack([logits[7], logits[step], logits[9]])
        sampled = busy.sample(rows, [("x", ALL), ("r", params), ("y", SamplingParams())])
        found.append(sampled[1].token_id)
    assert found == expected
    assert len(set(expected)) > 5


def test_two_requests_with_the_same_seed_draw_the_same() -> None:
    logits = random_logits(1).expand(2, VOCAB)
    sampler, params = Sampler(), SamplingParams(temperature=2.0, seed=7)
    for _ in range(10):
        first, second = sampler.sample(logits, [("a", params), ("b", params)])
        assert first == second


def test_requests_without_a_seed_draw_differently() -> None:
    logits = torch.zeros(8, VOCAB)
    assert len({one.token_id for one in Sampler().sample(logits, [(n, ALL) for n in range(8)])}) > 4


def test_a_forgotten_request_leaves_nothing_and_begins_anew() -> None:
    sampler, row, params = Sampler(), torch.zeros(1, VOCAB), SamplingParams(temperature=1.0, seed=11)
    first = [sampler.sample(row, [("r", params)])[0] for _ in range(5)]
    assert sampler.num_requests == 1
    sampler.forget("r")
    sampler.forget("never seen")
    assert sampler.num_requests == 0
    assert [sampler.sample(row, [("r", params)])[0] for _ in range(5)] == first


def test_a_greedy_request_keeps_no_generator() -> None:
    sampler = Sampler()
    sampler.sample(random_logits(1), [("r", SamplingParams(logprobs=5))])
    assert sampler.num_requests == 0


# ---- what may be drawn ----------------------------------------------------------------------------------------------


def test_tokens_come_as_often_as_the_softmax_says() -> None:
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    for temperature in (1.0, 0.5, 2.0):
        expected = (shares.log() / temperature).softmax(-1)
        sampler, params = Sampler(), SamplingParams(temperature=temperature, seed=0)
        counts = [0] * 4
        for _ in range(4000):
            counts[sampler.sample(shares.log().unsqueeze(0), [("r", params)])[0].token_id] += 1
        # 4 standard deviations of a binomial count; the seed makes the outcome fixed.
        for count, share in zip(counts, expected.tolist(), strict=True):
            assert abs(count - 4000 * share) < 4 * math.sqrt(4000 * share * (1 - share))


def test_top_k_keeps_exactly_k_the_lower_ids_among_equals() -> None:
    row = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0])
    assert support(row, top_k=3) == {4, 1, 2}
    assert support(row, top_k=99) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    row = log_of(0.1, 0.4, 0.2, 0.3)
    assert support(row, top_p=0.39) == {1}
    assert support(row, top_p=0.5) == {1, 3}
    assert support(row, top_p=0.75) == {1, 3, 2}
    assert support(row, top_p=0.95) == {0, 1, 2, 3}
    assert support(row, top_p=1e-12) == {1}


def test_top_p_keeps_the_lower_ids_among_equals() -> None:
    assert support(torch.zeros(10), top_p=0.35) == {0, 1, 2, 3}


def test_top_p_cuts_inside_a_crowd_of_equals() -> None:
    row = torch.zeros(30_000)
    row[20_000:] = 1e-3  # 10,000 tokens with a little more than a third of all
    drawn = support(row, num_draws=60, top_p=0.3)
    assert min(drawn) >= 20_000
    assert max(drawn) < 20_000 + 9_010


@settings(deadline=None, max_examples=80)
@given(
    logits=st.lists(st.floats(-30, 30, width=16), min_size=1, max_size=60),
    share=st.floats(0.01, 0.99),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
)
def test_the_share_is_cut_where_a_full_sort_would_cut_it(logits: list[float], share: float, temperature: float) -> None:
    row = torch.tensor(logits, dtype=torch.float32)
    shares = (row.double() / temperature).softmax(-1)
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    reached = shares[ranked].cumsum(-1)
    assume(float((reached - share).abs().min()) > 1e-5)  # f32 weights may fall on either side of a sum this near
    kept = ranked[: int((reached < share).sum()) + 1]
    weights = _weights(row.numpy(), SamplingParams(temperature=temperature, top_p=share))
    assert set(weights.nonzero()[0].tolist()) <= set(kept)
    assert {token_id for token_id in kept if shares[token_id] > 1e-30} <= set(weights.nonzero()[0].tolist())


def test_min_p_compares_with_the_most_likely_token() -> None:
    row = log_of(0.5, 0.26, 0.2, 0.04)
    assert support(row, min_p=0.5) == {0, 1}
    assert support(row, min_p=0.1) == {0, 1, 2}
    assert support(row, min_p=1.0) == {0}


def test_top_p_is_a_share_of_what_top_k_kept() -> None:
    row = log_of(0.5, 0.3, 0.2)
    assert support(row, top_p=0.6) == {0, 1}
    assert support(row, top_p=0.6, top_k=2) == {0}  # 0.5 of 0.8 is 0.625


def test_temperature_comes_before_the_filters() -> None:
    row = log_of(0.6, 0.3, 0.1)
    assert support(row, top_p=0.6) == {0}
    assert support(row, top_p=0.6, temperature=3.0) == {0, 1}
    assert support(row, min_p=0.6, temperature=3.0) == {0, 1}


@pytest.mark.parametrize("seed", range(8))
def test_the_filters_keep_what_hugging_face_keeps(seed: int) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    row = random_logits(1, seed=seed, vocab=40)
    scores = row
    for warper in (TemperatureLogitsWarper(1.5), TopKLogitsWarper(25), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)):
        scores = warper(None, scores)
    kept = set(scores[0].isfinite().nonzero().squeeze(1).tolist())
    drawn = support(row[0], num_draws=1500, temperature=1.5, top_k=25, top_p=0.9, min_p=0.05)
    assert drawn == kept


# ---- logits that are no logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), ALL, SamplingParams(logprobs=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_that_is_not_finite_is_refused_by_the_name_of_its_request(
    bad: float, params: SamplingParams, dtype: torch.dtype
) -> None:
    logits = random_logits(3).to(dtype)
    logits[1, 500] = bad
    with pytest.raises(KvfolioError, match=r"for request chat-7; .*check the model"):
        Sampler().sample(logits, [("a", params), ("chat-7", params), ("b", params)])


def test_a_refused_batch_moves_no_generator() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    logits = random_logits(2)
    broken = logits.clone()
    broken[1, 0] = math.nan
    sampler = Sampler()
    with pytest.raises(KvfolioError):
        sampler.sample(broken, [("a", params), ("b", params)])
    assert sampler.sample(logits[:1], [("a", params)]) == [choose(logits[0], params)]


@pytest.mark.parametrize("shape", [(2, VOCAB), (VOCAB,), (1, 0)])
def test_logits_of_another_shape_are_a_bug_of_ours(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="1 requests"):
        Sampler().sample(torch.zeros(shape), [("r", SamplingParams())])


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_none_are_given_unless_asked_for() -> None:
    assert choose(random_logits(1)[0], SamplingParams()).logprob is None


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_exactly_k_alternatives_are_listed_best_first(num_top: int) -> None:
    row = random_logits(1)[0]
    sampled = choose(row, SamplingParams(logprobs=num_top))
    expected = row.double().log_softmax(-1)
    assert [token_id for token_id, _ in sampled.top] == expected.sort(descending=True).indices[:num_top].tolist()
    for token_id, logprob in ((sampled.token_id, sampled.logprob), *sampled.top):
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-5)


def test_alternatives_of_equal_likelihood_come_by_id() -> None:
    row = torch.zeros(VOCAB)
    row[[5, 800]] = 1.0
    assert [token_id for token_id, _ in choose(row, SamplingParams(logprobs=5)).top] == [5, 800, 0, 1, 2]


def test_a_small_vocabulary_lists_what_there_is() -> None:
    assert len(choose(torch.zeros(3), SamplingParams(logprobs=20)).top) == 3


def test_logprobs_are_of_the_model_and_not_of_the_filters() -> None:
    row = random_logits(1)[0]
    plain = choose(row, SamplingParams(logprobs=3))
    bent = choose(row, SamplingParams(temperature=0.3, top_k=2, top_p=0.9, min_p=0.1, logprobs=3))
    assert bent.top == plain.top


def test_a_chosen_token_outside_the_alternatives_has_its_own_logprob() -> None:
    row = torch.zeros(VOCAB)  # uniform: the draw is hardly ever token 0
    sampled = choose(row, SamplingParams(temperature=1.0, seed=1, logprobs=1))
    assert sampled.token_id != 0
    assert sampled.top == ((0, pytest.approx(-math.log(VOCAB), abs=1e-5)),)
    assert sampled.logprob == pytest.approx(-math.log(VOCAB), abs=1e-5)


def test_asking_for_logprobs_does_not_change_the_tokens() -> None:
    row = random_logits(1)[0]
    for seed in range(20):
        plain, with_them = (SamplingParams(temperature=1.0, seed=seed, logprobs=k) for k in (None, 4))
        assert choose(row, plain).token_id == choose(row, with_them).token_id
