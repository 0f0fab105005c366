"""What `jaxalign doctor` examines: the machine, and this package on its devices."""
