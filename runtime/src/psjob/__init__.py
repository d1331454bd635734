"""Parameter-server training of PyTorch models: what a training script imports."""
