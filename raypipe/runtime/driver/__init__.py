"""Driver: the Ray actor that owns a run, its client in the user's process, and the connection to Ray.

    trainer  --client.py-->  DriverActor (driver.py)  -->  loop (raypipe/run), fleet (runtime/fleet)
                 |                |
      ray_cluster.py          publish.py           metrics for Prometheus
                              driver_failover.py   takeover of a lost driver's stages by the next driver

No tensor passes through the driver.
"""
