"""How fast the virtual server is, and what a run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceModel:
    """How long work takes in virtual time."""

    prefill_tokens_per_s: float = 15_000.0
    decode_step_s: float = 0.020
    growth_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What happened to one request; times in virtual seconds.

    ``cached_tokens`` is of its first admission; ``recomputed_tokens`` of all.
    """

    index: int
    arrival_s: float
    admitted_s: float
    first_token_s: float
    end_s: float
    input_tokens: int
    cached_tokens: int
    recomputed_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One finished run.

    Attributes:
        served: by turn index.
        use_peak: largest share of the pool held by running requests.
        use_mean: the same, averaged over virtual time.
        num_preemptions: requests that lost their blocks while running.
    """

    served: list[Served]
    use_peak: float
    use_mean: float
    num_preemptions: int
