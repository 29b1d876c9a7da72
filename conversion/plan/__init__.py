"""From the keys and shapes of a file to a complete plan, and its execution."""
