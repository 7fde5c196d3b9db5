"""``fdp plan``: memory, traffic and flops of a step at any scale, before it exists."""
