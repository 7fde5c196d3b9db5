"""Functional optimizers over pytrees: ``updates, state = optimizer.update(grads, state, params)``.

>>> optimizer = adamw(warmup_cosine(3e-4, warmup_steps=100, steps=5000), weight_decay=0.1)
>>> state = optimizer.init(params)
>>> updates, state = optimizer.update(grads, state, params)
>>> params = apply_updates(params, updates)
"""

from fdp.optimizers.adafactor import adafactor as adafactor
from fdp.optimizers.adafactor import clip_by_rms as clip_by_rms
from fdp.optimizers.adafactor import scale_by_factored_rms as scale_by_factored_rms
from fdp.optimizers.adafactor import scale_by_param_rms as scale_by_param_rms
from fdp.optimizers.adam import adam as adam
from fdp.optimizers.adam import adamw as adamw
from fdp.optimizers.adam import scale_by_adam as scale_by_adam
from fdp.optimizers.adaptive import adadelta as adadelta
from fdp.optimizers.adaptive import adagrad as adagrad
from fdp.optimizers.adaptive import adamax as adamax
from fdp.optimizers.adaptive import scale_by_adadelta as scale_by_adadelta
from fdp.optimizers.adaptive import scale_by_adagrad as scale_by_adagrad
from fdp.optimizers.adaptive import scale_by_adamax as scale_by_adamax
from fdp.optimizers.base import Optimizer as Optimizer
from fdp.optimizers.base import apply_updates as apply_updates
from fdp.optimizers.base import chain as chain
from fdp.optimizers.lamb import lamb as lamb
from fdp.optimizers.lamb import scale_by_trust_ratio as scale_by_trust_ratio
from fdp.optimizers.leaf_reductions import LOCAL as LOCAL
from fdp.optimizers.leaf_reductions import Reductions as Reductions
from fdp.optimizers.narrow_moments import narrow_moments as narrow_moments
from fdp.optimizers.schedules import Schedule as Schedule
from fdp.optimizers.schedules import constant as constant
from fdp.optimizers.schedules import cosine as cosine
from fdp.optimizers.schedules import linear as linear
from fdp.optimizers.schedules import piecewise as piecewise
from fdp.optimizers.schedules import step_decay as step_decay
from fdp.optimizers.schedules import warmup as warmup
from fdp.optimizers.schedules import warmup_cosine as warmup_cosine
from fdp.optimizers.sgd import sgd as sgd
from fdp.optimizers.sgd import trace as trace
from fdp.optimizers.transforms import add_decayed_weights as add_decayed_weights
from fdp.optimizers.transforms import clip_by_global_norm as clip_by_global_norm
from fdp.optimizers.transforms import clip_by_value as clip_by_value
from fdp.optimizers.transforms import scale as scale
from fdp.optimizers.transforms import scale_by_learning_rate as scale_by_learning_rate
from fdp.optimizers.transforms import scale_by_schedule as scale_by_schedule
