"""Where to cut a model: one solver for each shape of the question, one form of answer.

    a chain, devices alike or not      prefix_sum.py     probing prefix sums (Lv et al., CCGrid'23); lineup.py
    a graph with branches              antichain.py      over all ways to cut it, on states.py
    stages with replicas               hierarchical.py   levels of bandwidth (PipeDream, SOSP'19)
    several stages on one worker       chunks.py
    nothing measured, or cuts given    chain.py

Every solver takes the graph, the cluster and limits.py, and gives answer.py. fit.py tries whether what a stage holds
fits, and refuses with the nearest plan that would.
"""
