"""Numbers: acceptance, step times, hardware, model shapes and memory.

Each model is a function of what it is given, with its source named. Imports numpy and `workloads.streams`; must not
know the core, the engine or YAML.
"""
