"""Partition solvers: one for each kind of problem, with a common result.

    a chain, devices alike or not      prefix_sum.py     probing prefix sums (Lv et al., CCGrid'23)
    a graph with branches              antichain.py      over all ways to cut it
    several stages on one worker       chunks.py
    nothing measured, or cuts given    chain.py

Every solver takes the graph, the cluster and ``costs.Limits``, tries the orders of devices of device_order.py, and
builds its Partition with answer.py. fit.py checks the memory of the stages, and names the nearest plan that would fit
if the partition does not.
"""
