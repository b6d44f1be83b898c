"""The benchmarks that need no GPU, one after the other, and what they aim at."""
