"""What was measured and how it is shown."""
