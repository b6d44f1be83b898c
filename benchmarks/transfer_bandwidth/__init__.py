"""What moving blocks between an engine, host memory and a store costs."""
