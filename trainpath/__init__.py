"""Measure the data path of distributed PyTorch training, remove its waits, decide what is next."""
