"""What can be plugged in, as data: one record type and one registry for each kind. Nothing here imports JAX.

Config validation, the RL core, the planner and the report read these records and keep no lists of names of their own. The
layer is the lowest but `errors`, so that every package may read it; functions are named as "module:attribute" and imported
when they are first used.
"""
