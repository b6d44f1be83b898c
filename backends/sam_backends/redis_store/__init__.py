"""Redis and Valkey: standalone, unix socket, TLS and ACL, Sentinel, Cluster.

redis-py makes the connections, authenticates and knows the topology. For a standalone
server the bytes go over its sockets by code of ours (``link``), which neither copies
them nor waits beyond a deadline; behind TLS, Sentinel and Cluster redis-py is the
whole path (``client``). Both carry out the same commands (``runner``). Servers must be
Redis 7.0 or Valkey 7.2 or later.
"""

from __future__ import annotations

from sam_backends.redis_store.blocks import RedisStore
from sam_backends.redis_store.client import ClientRunner
from sam_backends.redis_store.direct import DirectRunner
from sam_backends.redis_store.manifests import RedisManifests
from sam_backends.redis_store.runner import Runner
from sam_backends.redis_store.target import Target, parse
from sam_connector.storage.registry import OpenStore, StoreOptions


def open_store(url: str, options: StoreOptions) -> OpenStore:
    """The store at ``url``; the first call connects.

    Raises:
        ConfigurationError: the URL is not right.
    """
    target = parse(url, options)
    return OpenStore(RedisStore(_runner(target)), RedisManifests(_runner(target)))


def _runner(target: Target) -> Runner:
    return DirectRunner(target) if target.is_direct else ClientRunner(target)


__all__ = ["RedisManifests", "RedisStore", "open_store"]
