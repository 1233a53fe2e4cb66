"""Reports on processes: activity, memory, stacks, exit status, and the trace."""
