"""Models whose weights this process never holds: built on the meta device, filled on the workers that hold the stages.

function --build_on_meta--> model, parameters on meta, buffers with values     meta_init.py
                  |
stages  <--ModuleInit       reset_parameters, _init_weights, ... per module     meta_init.py
        <--WeightFiles      safetensors files                                   weight_files.py
"""
