"""The host memory tier, scheduler side: what is copied, when, and for whom."""
