"""Native kernels in C++: shipped or compiled on this machine, called through ctypes, checked before use."""
