"""Ray's worker processes, forked from a server that has imported torch and the workers once.

A worker that Ray starts by itself imports for 8 s of CPU; one of these starts in 0.2 s. What is no
plain worker is started as Ray does it, and so is a worker with other variables that libraries read
while they load (threads, malloc). Runs that a test starts as a command know nothing of this.
"""
