from __future__ import annotations

from sam_connector.pooling.config import PoolingConfig


def test_values_outlive_the_interval_at_which_they_are_refreshed() -> None:
    config = PoolingConfig()

    assert config.ttl_s > 2 * config.keep_alive_interval_s


def test_absence_is_believed_for_less_time_than_presence() -> None:
    """Others write at any time; what is there mostly stays."""
    config = PoolingConfig()

    assert config.negative_ttl_s < config.positive_ttl_s < config.ttl_s


def test_a_tombstone_outlives_every_attempt_at_a_late_write() -> None:
    config = PoolingConfig()
    waits_s = sum(config.retry_s * 2**n for n in range(config.max_attempts))

    assert config.tombstone_ttl_s > 10 * (
        waits_s + config.max_attempts * config.call_timeout_s
    )
