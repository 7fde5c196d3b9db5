"""What every rank of a test needs: imported once, by the process that the ranks are forked from."""

import torch.distributed.checkpoint
import torch.distributed.tensor  # noqa: F401

import fdp.run.training_run
import fdp.step  # noqa: F401
