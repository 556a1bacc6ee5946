"""The arithmetic: paged attention and the small operations, in C++ and, as the definition of correct, in torch."""
