"""A training script for DDP, Horovod or plain PyTorch as one for psjob: edits of its text, and sentences on what is left to the user."""
