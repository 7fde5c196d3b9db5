"""Files: checkpoints (``dcp``: the shards inside), safetensors, private file modes."""
