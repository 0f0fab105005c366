"""Pure functions of arrays: no I/O, no model, no state. Each module covers one subject; import the module you need.

Dimension letters: B batch, T time, N response tokens. Every input dtype is computed in float32, except that float64 stays
float64. Masks are 0 or 1 (bool, int or float); values at masked positions, including inf and NaN, have no effect.
"""
