"""Files on disk.

checkpoint, checkpoint_record   the training state, published by one rename; the record that detects damage
dcp                             the shards inside, by ``torch.distributed.checkpoint``
safetensors                     parameters as one ``model.safetensors``
private_files                   files that only their owner can read
"""
