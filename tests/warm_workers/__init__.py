"""Worker processes of Ray and servers of SGLang, forked from one that has imported what they need.

A worker that Ray starts by itself imports for 8 s of CPU, and so does a server; one of these starts
in 0.2 s. What is no plain worker is started as Ray does it, and so is what has other variables that
libraries read while they load (threads, malloc). Runs that a test starts as a command know nothing
of this.
"""
