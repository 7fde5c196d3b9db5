"""Adapters on a frozen model: LoRA and prefix tuning."""
