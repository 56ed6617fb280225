"""Chapter 12. Code execution in a sandbox: programs that a model wrote run where they can harm, read and learn nothing.

    pool        in the trainer: hands programs to worker processes, reads what they answer
    worker      one process for each program, watched by a keeper that ends it
    isolation   Linux namespaces, limits, no privileges
    filter      the system calls that a program may make (seccomp)
    values      inputs and results as JSON

What is not guaranteed: an error of the kernel in a system call that the filter lets through opens the sandbox, and side channels (time,
caches) are not closed. For programs by an opponent with money, run the whole training in a virtual machine.
"""
