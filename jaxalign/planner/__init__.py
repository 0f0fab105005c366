"""Plans a run before it starts: memory, time and cost, by arithmetic and by the compiler."""
