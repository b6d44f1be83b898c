"""Two servers and one store: sessions that outlive an instance."""
