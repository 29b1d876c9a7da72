"""What happens beside the steps of a training, as callbacks of transformers: progress, patience, an early end."""
