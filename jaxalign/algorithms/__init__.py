"""Pure mathematics on arrays: no I/O, no model, no state. One module a subject; import the module you need.

Dimension letters: B batch, T time, N response tokens. Whatever dtype comes in, the work is done in float32 (float64
stays float64). Masks are 0 or 1 (bool, int or float); values at masked places, inf and NaN included, change nothing.
"""
