"""The search for a schedule that the planner and the controller of a run share.

    kind, M, seconds, what fits --> candidates --> scored by replay --> quickest

``candidates`` names the schedules that are worth a look and fit; ``replay`` says what a step of one takes;
``quickest`` takes the best, and of equals the one that holds least. The planner scores them on the seconds of a profile
and the links of a cluster, the controller on the messages that it has measured.

Left out: cuts, numbers of micro-batches and codecs, which their callers choose.
"""
