"""What the connector costs on the scheduler's thread, with and without hints."""
