"""Sharing models: the card with measured facts, and what concerns the Hub."""
