"""``fdp plan``: memory, traffic and flops of a step at any scale, before it runs.

estimate    the footprint of a step: peaks by kind, transfers, flops
trace       one step on tensors without memory
ledger      the dispatch mode that records storages, collectives and flops
workspace   memory inside CUDA kernels that a trace cannot see
"""
