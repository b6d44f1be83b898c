"""The whole way, engine's memory to a store and back, on an embedded Valkey."""

from __future__ import annotations

import torch


def measure(device: torch.device, num_rounds: int) -> dict[str, float]:
    """GB/s of each leg and of the whole, as ``WholePath`` measures them.

    Raises:
        ImportError: vLLM or the packages for a store are not here.
        ConfigurationError: no Valkey can be started.
    """
    # They need more than the rest of this benchmark does.
    from benchmarks.store_bandwidth.whole_path import WholePath
    from sam_backends.embedded import EmbeddedServer

    # What is deleted is gone at once, not while the next thing is measured.
    with EmbeddedServer(lazyfree_lazy_user_flush="no") as server:
        path = WholePath(server.url, device)
        try:
            return path.measure(num_rounds)
        finally:
            path.close()


def figures(rates: dict[str, float]) -> dict[str, object]:
    """Both ways, each beside its slowest leg."""
    found: dict[str, object] = {}
    for way, legs in (
        ("out", ("block_to_slot", "slot_to_store")),
        ("back", ("store_to_slot", "slot_to_block")),
    ):
        slowest = min(legs, key=lambda leg: rates[leg])
        found[f"whole_path_{way}_gbs"] = rates[way]
        found[f"whole_path_{way}_slowest_leg"] = slowest
        found[f"whole_path_{way}_slowest_leg_gbs"] = rates[slowest]
        found[f"whole_path_{way}_vs_slowest_leg"] = round(
            rates[way] / rates[slowest], 3
        )
    return found
