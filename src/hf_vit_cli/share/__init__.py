"""Commands that convert and share."""
