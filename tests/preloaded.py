"""What every rank of a test needs, for the process from which ranks are forked (harness.py)."""

import gc

import torch._dynamo  # optimizers import it
import torch.distributed
import torch.distributed.checkpoint

import retrograde
import tests.live

__all__ = ["retrograde", "tests", "torch"]
gc.collect()
gc.freeze()
