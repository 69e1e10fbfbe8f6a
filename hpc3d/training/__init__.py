"""What turns a model into a run: data, optimiser, schedule of the learning rate, loop."""
