"""Many ranks: meshes, sharding, collectives, launching, offload.

launch, rendezvous, heartbeat   join the ranks of a run and notice lost ones
mesh, sharding                  how ranks are arranged and which shard of a leaf each one stores
collectives                     every collective of a step, by name
gather_reduce                   all-gather of weights, reduce-scatter of sums
tensor_parallel                 layers split over the tensor axis
sharded_norms                   norms and sums of leaves that are sharded
agree                           exchanges between ranks outside the step
offload                         which parts of the state stay in CPU memory
"""
