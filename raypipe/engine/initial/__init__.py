"""Models whose weights this process never holds: built on the meta device, filled where their stages are.

function --built_without_weights--> model, parameters on meta        building.py
                  |                      |
                  |                      +--stand_ins--> traced like a model on the CPU         stand_ins.py
                  +--> InitTape: what was done to every parameter    tape.py
                          |
stages  <--KeyedInit------+        a tape, played for the parameters of a stage
        <--WeightFiles-------      safetensors files                 files.py
"""
