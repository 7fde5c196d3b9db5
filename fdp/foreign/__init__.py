"""Models from elsewhere: any ``nn.Module``, folders of ``transformers``, adapters, custom operations.

>>> model, params = from_module(module, loss=loss, example=batch)
>>> model, params = load("models/tiny")
>>> model, params = lora(model, params, rank=8, alpha=16.0, targets=("*.c_attn.weight",), key=key)
>>> model, params = prefix_tuning(module, tokens=8, key=key)
"""

from fdp.foreign.adapters.lora import lora as lora
from fdp.foreign.adapters.lora import lora_model as lora_model
from fdp.foreign.adapters.lora import merge as merge
from fdp.foreign.adapters.lora import train_only as train_only
from fdp.foreign.adapters.prefix import prefix_model as prefix_model
from fdp.foreign.adapters.prefix import prefix_tuning as prefix_tuning
from fdp.foreign.adapters.prefix_save import save_prefix as save_prefix
from fdp.foreign.hub.hugging_face import load as load
from fdp.foreign.hub.hugging_face import load_model as load_model
from fdp.foreign.hub.hugging_face import model_of as model_of
from fdp.foreign.hub.hugging_face import save as save
from fdp.foreign.inspect import inspect_model as inspect_model
from fdp.foreign.leaves import params_of as params_of
from fdp.foreign.module import from_module as from_module
from fdp.foreign.uses.custom_rules import operation as operation
from fdp.foreign.uses.custom_rules import rule as rule
