"""What every rank of a test needs: imported once, by the process that the ranks are forked from."""

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.tensor  # noqa: F401

import fdp.cli.main
import fdp.cli.session
import fdp.parallel.rendezvous
import fdp.run.training_run
import fdp.step  # noqa: F401
