"""Exact recall: a number is put at several depths of a long text, and the model is asked for it, greedily.

An answer counts when it is the number and nothing more of one: no digit behind it. Knows nothing of formats.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfolio.engine.llm import LLM
from kvfolio.engine.params import SamplingParams
from kvfolio.engine.text import Tokenizer
from kvfolio.errors import OptionError

# Random-looking, but the same on every machine; each depth has its own, so that none can be remembered from another.
NUMBERS = ("71432", "50896", "28317", "94605", "36279", "60948", "17583", "82061")
NEEDLE = "\nThe secret number is {number}. Remember: the secret number is {number}.\n"
QUESTION = "\n\nWhat is the secret number mentioned in the text above? Answer with the number only."
# The answer is begun for the model: a small one knows the number, but does not always say it first.
LEAD = "The secret number mentioned in the text above is"
ANSWER_TOKENS = 12  # five digits, one token each at most, and what may stand around them


@dataclass(frozen=True, slots=True)
class Haystack:
    """One prompt with its needle."""

    prompt: tuple[int, ...]
    number: str
    depth: float  # share of the text before the needle


@dataclass(frozen=True, slots=True)
class Recall:
    """The answers of one cache, in the order of the haystacks."""

    answers: tuple[str, ...]
    found: tuple[bool, ...]

    @property
    def num_found(self) -> int:
        return sum(self.found)

    def num_like(self, other: "Recall") -> int:
        """How many answers are the other's, letter by letter; right or wrong."""
        return sum(one == two for one, two in zip(self.answers, other.answers, strict=True))


def make_haystacks(tokenizer: Tokenizer, token_ids: Sequence[int], depths: int) -> tuple[Haystack, ...]:
    """``depths`` prompts over the text of ``token_ids``, their needles spread evenly, the first one first.

    Through the chat template where the model has one. Raises OptionError for more depths than there are numbers.
    """
    if not 1 <= depths <= len(NUMBERS):
        raise OptionError(f"{depths} depths for the needle; accepted: 1 to {len(NUMBERS)}")
    haystacks = []
    for place, number in enumerate(NUMBERS[:depths]):
        depth = (place + 0.5) / depths
        at = round(len(token_ids) * depth)
        before, after = tokenizer.decode(token_ids[:at]), tokenizer.decode(token_ids[at:])
        text = before + NEEDLE.format(number=number) + after + QUESTION
        if tokenizer.has_chat_template:
            prompt = [*tokenizer.encode_chat([{"role": "user", "content": text}]), *tokenizer.encode_more(LEAD)]
        else:
            prompt = tokenizer.encode(f"{text}\n\n{LEAD}")
        haystacks.append(Haystack(tuple(prompt), number, depth))
    return tuple(haystacks)


def recall(llm: LLM, haystacks: Sequence[Haystack], on_prompt: Callable[[Haystack], None]) -> Recall:
    """Ask ``llm`` for every needle; ``on_prompt`` is told of each that is done.

    One after the other: what the texts have in common before the needle comes out of the prefix cache.
    """
    answers, found = [], []
    for haystack in haystacks:
        completion = llm.generate([haystack.prompt], SamplingParams(max_tokens=ANSWER_TOKENS))[0]
        answers.append(completion.text)
        found.append(is_recalled(completion.text, haystack.number))
        on_prompt(haystack)
    return Recall(tuple(answers), tuple(found))


def is_recalled(answer: str, number: str) -> bool:
    """Whether ``answer`` begins with ``number``: signs and spaces may stand before it, no digit behind."""
    return re.match(rf"\W*{number}(?!\d)", answer) is not None
