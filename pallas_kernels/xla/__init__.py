"""Plain XLA forms of the operations: fast on a CPU, correct anywhere."""
