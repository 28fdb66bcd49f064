"""What is reported: the compiler's account of the kernels, tables, figures."""
