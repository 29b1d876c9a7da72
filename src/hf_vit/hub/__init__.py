"""Share models on the Hub: write model cards, push, and verify."""
