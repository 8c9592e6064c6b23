"""Runs and clusters as YAML files.

    run.yaml     --run_file.py-->     checked values  --api/from_file.py-->  trainer
    cluster.yaml --cluster_file.py-->  ir.Cluster
    trainer      --config_yaml.py-->    config.yaml, which trains again

``yaml_text.py`` reads YAML with the line of every key, so that a mistake is named by file, line and field. Nothing in
a file can run code; a target such as ``my_model:make`` is imported later, by api/from_file.py.
"""
