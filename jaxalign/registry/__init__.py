"""The pluggable parts, as data: one record type and one registry per kind. No module in this package imports JAX.

Config validation, the RL core, the planner and the report read these records and keep no lists of names of their own. This
package depends only on `errors`, so every package may import it. Records name functions as "module:attribute"; they are
imported on first use.
"""
