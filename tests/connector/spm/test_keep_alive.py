"""Keys of live leases are looked up, and no others."""

from __future__ import annotations

import pytest

from tests.connector.driving import STREAMS, hint
from tests.connector.spm.driving import ASYNC_TRAITS, SpmDriver
from tests.connector.spm.inner_connectors import CALLS

pytestmark = pytest.mark.vllm

TRAITS = ASYNC_TRAITS | {"refresh": "lookup"}
LOOKUP = "get_num_new_matched_tokens"
INTERVAL_S = 0.001


def driver_with(**extra: object) -> SpmDriver:
    driver = SpmDriver(
        traits=TRAITS, extra_config={"keep_alive_s": INTERVAL_S, **extra}
    )
    driver.spm.keep_alive._has_thread = False
    return driver


def refresh(driver: SpmDriver, times: int = 3) -> int:
    """Look-ups of several rounds; a round has passed before each."""
    before = CALLS[LOOKUP]
    for _ in range(times):
        now = driver.spm.keep_alive._clock.now()
        while driver.spm.keep_alive._clock.now() < now + 2 * INTERVAL_S:
            pass
        driver.spm.keep_alive.refresh()
    return CALLS[LOOKUP] - before


def serve(driver: SpmDriver, session_id: str, *, ttl: float | None) -> None:
    driver.run(
        f"r-{session_id}", STREAMS[0][:161], agent_hint=hint(session_id, ttl=ttl)
    )
    driver.ask(session_id, "offload")


def test_a_lease_keeps_its_keys_alive_without_steps() -> None:
    with driver_with() as driver:
        serve(driver, "s", ttl=600)
        driver.call("set_lease", tenant="", session_id="s", ttl=600)
        assert refresh(driver) > 0
        assert driver.spm.stats()["keys_refreshed"] > 0
        driver.check_no_leak()


def test_sessions_that_share_a_key_refresh_it_once_a_round() -> None:
    with driver_with() as driver:
        for name in ("a", "b"):
            serve(driver, name, ttl=600)
            driver.call("set_lease", tenant="", session_id=name, ttl=600)
        # It takes two calls, at its beginning and after it, to go through a round.
        assert 0 < refresh(driver, times=6) <= 3
        driver.check_no_leak()


@pytest.mark.parametrize("end", ["no lease", "ended", "evicted", "freed"])
def test_what_no_lease_covers_is_left_to_the_store(end: str) -> None:
    with driver_with() as driver:
        serve(driver, "s", ttl=600)
        driver.call("set_lease", tenant="", session_id="s", ttl=600)
        if end in ("no lease", "ended"):
            driver.call("set_lease", tenant="", session_id="s", ttl=0)
        elif end == "evicted":
            driver.edit("s", {"type": "evict"})
        else:
            driver.call("free_session", tenant="", session_id="s")
        assert refresh(driver) == 0
        driver.check_no_leak()


def test_a_connector_that_is_not_refreshed_by_look_ups_is_not_asked() -> None:
    with SpmDriver(extra_config={"keep_alive_s": INTERVAL_S}) as driver:
        serve(driver, "s", ttl=600)
        driver.call("set_lease", tenant="", session_id="s", ttl=600)
        assert refresh(driver) == 0
        driver.check_no_leak()


def test_an_idle_engine_refreshes_too() -> None:
    with SpmDriver(traits=TRAITS, extra_config={"keep_alive_s": INTERVAL_S}) as driver:
        serve(driver, "s", ttl=600)
        driver.call("set_lease", tenant="", session_id="s", ttl=600)
        before = CALLS[LOOKUP]
        thread = driver.spm.keep_alive._thread
        assert thread is not None
        for _ in range(2_000):
            if CALLS[LOOKUP] > before:
                break
            thread.join(timeout=0.005)
        assert CALLS[LOOKUP] > before
        driver.spm.close()
        assert not thread.is_alive()
        driver.check_no_leak()
