// What GNU's C++ library takes from glibc only since glibc 2.32, so that the plug-in can be loaded with older ones.

// Whether the process has a single thread, so that reference counts need not be atomic. A process with an agent has more.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
