"""Tests run in parallel processes, so each of them (and its children) computes on one thread."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
