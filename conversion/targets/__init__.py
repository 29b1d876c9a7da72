"""The way back: the libraries that models can go to, one class each, each checked in its own runtime."""
