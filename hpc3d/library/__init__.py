"""What notebooks and scripts call: a cube of threads, training, predictions, plans, runs."""
