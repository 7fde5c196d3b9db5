"""Training on many ranks: launching, meshes, sharding, collectives, offload.

launch, rendezvous, heartbeat   join the ranks of a run and notice lost ones
mesh, sharding                  arrange ranks and plan which shard of a leaf each one stores
dtensors, sharded_init          wrap shards as DTensors; draw each rank's shard of the first parameters
collectives                     every collective of a step, by name
gather_reduce                   all-gather of weights, reduce-scatter of sums
tensor_parallel                 layers split over the tensor axis
sharded_norms                   norms and sums of leaves that are sharded
agree                           exchanges between ranks outside the step
offload                         which parts of the state stay in CPU memory
"""
