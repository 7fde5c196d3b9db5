"""K-FAC: natural gradients from a Kronecker-factored Fisher information, exact across ranks.

>>> from fdp.kfac import KfacConfig, kfac
>>> k = kfac(model, microbatch, learning_rate=0.1, config=KfacConfig(damping=3e-2))
>>> state = k.refresh(state, microbatch, mask, key, t)          # before step t, which uses k.optimizer
"""

from fdp.kfac.config import Distribution as Distribution
from fdp.kfac.config import KfacConfig as KfacConfig
from fdp.kfac.factor_forms import Form as Form
from fdp.kfac.factor_storage import Where as Where
from fdp.kfac.factors import CurvatureError as CurvatureError
from fdp.kfac.form_policy import auto as auto
from fdp.kfac.form_policy import by_path as by_path
from fdp.kfac.form_policy import everything as everything
from fdp.kfac.form_policy import plan_forms as plan_forms
from fdp.kfac.inversion.damped_inverse import Damping as Damping
from fdp.kfac.inversion.damped_inverse import invert as invert
from fdp.kfac.inversion.one_side import Via as Via
from fdp.kfac.layers import survey as survey
from fdp.kfac.measure.estimator import Sharing as Sharing
from fdp.kfac.measure.fisher import Fisher as Fisher
from fdp.kfac.optimizer import Kfac as Kfac
from fdp.kfac.optimizer import kfac as kfac
from fdp.kfac.preconditioning.one_layer import precondition as precondition
from fdp.kfac.state import KfacState as KfacState
from fdp.kfac.types import Curvature as Curvature
from fdp.kfac.types import Layer as Layer
