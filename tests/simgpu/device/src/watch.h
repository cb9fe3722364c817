// The one function of waits.cpp that knows Python.
#pragma once
#include <Python.h>

namespace simgpu {
void watch(PyObject* function); // called with each count's name; nullptr: none
} // namespace simgpu
