"""Ways to damage and forge checkpoints, used by `campaigns.forged` and by tests of readers."""
