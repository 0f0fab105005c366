"""Plans a run before it starts: memory, time and cost, estimated by arithmetic or reported by the compiler."""
