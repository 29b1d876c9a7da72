"""Ordinary things that people do with a model, tried by `campaigns.silent_numbers`."""
