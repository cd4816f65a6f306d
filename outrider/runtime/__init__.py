"""The native runtime: a pass of the model as one call into a C++ library, without torch in it and
without compiling."""
