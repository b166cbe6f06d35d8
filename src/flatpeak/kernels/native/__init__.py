"""Native kernels in C++: shipped or compiled on this machine, called through ctypes and checked before use."""
