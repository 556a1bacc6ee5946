"""What a user chooses about scheduling, and the running totals a scheduler keeps. Plain data."""

from dataclasses import dataclass, field

from kvfolio.errors import OptionError

DEFAULT_MAX_STEP_TOKENS = 1024  # measured: docs/lab.md
DEFAULT_MAX_PREEMPTIONS = 3
PREEMPTIONS = ("auto", "recompute", "swap")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What a user chooses about scheduling."""

    max_context: int  # tokens the model can read
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS  # prompt and decode tokens computed in one step
    preemption: str = "auto"  # how a request gives up its blocks: auto is whatever is predicted to cost less
    max_preemptions: int = DEFAULT_MAX_PREEMPTIONS  # of one request; then it waits until nobody can take its blocks

    def __post_init__(self) -> None:
        if self.max_step_tokens < 1 or self.max_context < 1:
            raise OptionError(
                f"max_step_tokens is {self.max_step_tokens} and max_context {self.max_context}; both must be at least 1"
            )
        if self.preemption not in PREEMPTIONS:
            raise OptionError(f"preemption is {self.preemption!r}; accepted: {', '.join(PREEMPTIONS)}")
        if self.max_preemptions < 0:
            raise OptionError(f"max_preemptions is {self.max_preemptions}; accepted: 0 or more")


@dataclass(slots=True)
class Counters:
    """Running totals since the scheduler was made."""

    num_steps: int = 0
    num_tokens_computed: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions whose blocks went to the host pool
    num_swaps_refused: int = 0  # swapping was wanted, but the host pool was full or absent
    num_tokens_lost: int = 0  # cached tokens that preemptions gave up
    num_refused: int = 0
    num_finished: int = 0  # by themselves
    num_left: int = 0  # from outside: cancelled, or ended by a stop string
    num_prompt_tokens: int = 0  # of requests that started
    num_hit_tokens: int = 0  # of these, found in the cache
    num_waits: int = 0  # requests that waited for blocks which another was computing
    misses: dict[str, int] = field(default_factory=dict)  # requests by the reason for their first miss
