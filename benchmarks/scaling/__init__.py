"""What a million sessions cost a Redis Cluster; see ``docs/scaling.md``."""
