"""Repositories of the Hub as they are read: what is fetched, what is refused, and why it failed."""
