"""The process that owns a run on Ray.

    trainer  --client.py-->  DriverActor (driver.py)  -->  loop (runtime/run), fleet (runtime/workers)
                                  |
                              publish.py     metrics for Prometheus
                              succession.py  what one driver leaves to the next

No tensor passes through the driver.
"""
