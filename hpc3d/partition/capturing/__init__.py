"""What lets torch.export trace a module that it does not take as it is."""
