"""How fast the virtual server is, and what a run leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceModel:
    """What the virtual server's resources can do; defaults: an 8B model on one
    H100-class GPU.

    Attributes:
        max_batched_tokens: prompt tokens of one step, at most.
        decode_step_s: a step that decodes one request without context.
        decode_request_s: what each further request adds to it.
        decode_context_token_s: what each token of their contexts adds, whose keys and
            values are read: 128 KiB at 3.3 TB/s.
        link_bytes_per_s: between GPU and host, each way, shared by all copies.
        kv_bytes_per_token: of all layers.
        copy_slowdown: how much longer a step takes while one direction of the link is
            busy: a copy takes that share of the GPU's memory bandwidth.
        idle_step_s: a step that has nothing to compute.
        growth_tokens: room for output is taken that many tokens at a time.
    """

    prefill_tokens_per_s: float = 15_000.0
    max_batched_tokens: int = 8_192
    decode_step_s: float = 0.020
    decode_request_s: float = 0.000_05
    decode_context_token_s: float = 0.000_000_04
    link_bytes_per_s: float = 50e9
    kv_bytes_per_token: int = 128 << 10
    copy_slowdown: float = 0.015
    idle_step_s: float = 0.001
    growth_tokens: int = 512

    @classmethod
    def instant(cls) -> ServiceModel:
        """Everything takes no time: an open loop, for hit rates alone."""
        return cls(
            prefill_tokens_per_s=1e15,
            decode_step_s=0.0,
            decode_request_s=0.0,
            decode_context_token_s=0.0,
            link_bytes_per_s=1e18,
            copy_slowdown=0.0,
            idle_step_s=0.0,
            growth_tokens=1 << 20,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What happened to one request; times in virtual seconds.

    ``cached_tokens`` is of its first admission, ``loaded_tokens`` those of them that
    came from the host tier; ``recomputed_tokens`` of all admissions.
    """

    index: int
    arrival_s: float
    admitted_s: float
    first_token_s: float
    end_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    loaded_tokens: int
    recomputed_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` if there was only one."""
        if self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One finished run.

    Attributes:
        served: by turn index.
        use_peak: largest share of the pool held by running requests.
        use_mean: the same, averaged over virtual time.
        kept_peak: largest share of the pool that is in use or kept: with stock LRU
            whatever holds content, with hints what a session still holds.
        kept_mean: the same, averaged over virtual time.
        num_preemptions: requests that lost their blocks while running.
        bytes_moved: over the link, both ways.
        bytes_prefetched: those of them that a prefetch brought.
        bytes_wasted: those of these that were gone before a request used them.
        counts: what the arm itself has counted.
    """

    served: list[Served]
    use_peak: float
    use_mean: float
    kept_peak: float
    kept_mean: float
    num_preemptions: int
    bytes_moved: int
    bytes_prefetched: int
    bytes_wasted: int
    counts: Mapping[str, int]
