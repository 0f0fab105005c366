"""Which model lies on which devices in which phase, and what the compiler says that it takes."""
