"""Native kernels in C++: compiled by the compiler at hand or shipped, called through ctypes, checked before use."""
