"""What one operation of the core costs, and how that grows with what is kept."""
