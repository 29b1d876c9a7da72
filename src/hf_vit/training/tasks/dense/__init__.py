"""Learning to predict masks and boxes."""
