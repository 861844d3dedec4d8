"""Our own kernels: descriptions as data, their CUDA C++, and how they are compiled. They know no graph."""
